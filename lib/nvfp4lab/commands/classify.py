"""Say why a server failed, from its log: verdict, class, the decisive line, the likely cause and what to try."""

import argparse
import json
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("log", metavar="LOG", help="the server's log, plain or gzip; - reads standard input")
    parser.add_argument(
        "--exit", dest="exit_state", metavar="STATE", type=_exit_state, help="how it ended: exit code, -SIGNAL, timeout or running"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def _exit_state(text: str):
    if text in ("timeout", "running"):
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no exit code, no -SIGNAL such as -9, and not timeout or running") from None


def run(args: argparse.Namespace) -> int:
    from nvfp4lab.server import logs

    answer = logs.classify(sys.stdin.buffer if args.log == "-" else args.log, args.exit_state)
    if args.json:
        print(json.dumps(answer.as_contract(), ensure_ascii=False))
        return 0
    print(f"{answer.verdict} · {answer.symptom_class}")
    if answer.line is not None:
        print(f"  line {answer.line_number}: {answer.line}")
    print(f"  cause: {answer.cause}")
    print(f"  try:   {answer.advice}")
    if answer.reports:
        print(f"  like:  {', '.join(answer.reports)}")
    return 0
