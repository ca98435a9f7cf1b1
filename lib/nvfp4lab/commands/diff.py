"""Compare two runs: changed verdicts, numbers that moved beyond their intervals, versions that explain it."""

import argparse
import dataclasses
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `nvfp4lab diff`."""
    parser.add_argument("before", type=Path, metavar="RUN_A", help="run folder or ledger.jsonl")
    parser.add_argument("after", type=Path, metavar="RUN_B", help="run folder or ledger.jsonl")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the differences; exit code 0 also when there are some."""
    from nvfp4lab.decide.gather import recorded
    from nvfp4lab.report.run_diff import compare

    found = compare(recorded(args.before), recorded(args.after))
    if args.json:
        print(json.dumps(dataclasses.asdict(found), ensure_ascii=False))
        return 0
    for name, (before, after) in found.versions.items():
        print(f"version  {name}: {before} -> {after}")
    for change in found.changes:
        moved = f"{change.before or '-'} -> {change.after or '-'}"
        print(f"{change.what:8} {change.stage} {change.subject} (cc {change.cc}): {moved}{why(change)}")
    if not found.changes:
        print("no difference beyond the intervals")
    return 0


def why(change) -> str:
    """Which versions differ between the two records of a change; what only one run has is not explained."""
    if change.what in ("gone", "new"):
        return ""
    return f" (differs in {', '.join(change.explained_by)})" if change.explained_by else " (no version differs)"
