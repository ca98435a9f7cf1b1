"""Join the evidence of runs into the flags to launch with, the reasons, and when to ask again."""

import argparse
import json
from pathlib import Path

from nvfp4lab.errors import LabError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `nvfp4lab decide`."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, ledger.jsonl, or a params file to ask about")
    parser.add_argument("--cc", help="compute capability asked about (default: what the evidence is about)")
    parser.add_argument("--sglang", help="SGLang version asked about")
    parser.add_argument("--flashinfer", help="FlashInfer version asked about")
    parser.add_argument("--model", help="what to put behind --model-path")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the decision; exit code 0 with a recommendation or an honest reason why there is none."""
    from nvfp4lab.decide import decide
    from nvfp4lab.decide.gather import gather

    question, records = gather(args.runs, {name: getattr(args, name) for name in ("cc", "sglang", "flashinfer", "model")})
    if question is None:
        raise LabError(f"no evidence about any backend in {', '.join(map(str, args.runs))}")
    decision = decide(question, records)
    if args.json:
        print(json.dumps(decision.to_data(), ensure_ascii=False))
        return 0
    for contradiction in decision.contradictions:
        print(f"CONTRADICTION {contradiction}")
    print(decision.command or "no recommendation")
    print(f"why: {decision.why}" + (f" ({decision.confidence})" if decision.confidence else ""))
    for line in decision.moot:
        print(f"moot: {line}")
    for rejected in decision.rejected:
        print(f"not {rejected.op} {rejected.backend}: {rejected.why}")
    for name, change in decision.expires_with.items():
        print(f"ask again when {name} is no longer {change['now']}: it decides {change['invalidates']}")
    return 0
