"""Run kernel cases, each in its own process, and print what happened to every one."""

import argparse
import itertools
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """[PARAMS] and which of its cases."""
    parser.add_argument("params", metavar="PARAMS", nargs="?", type=Path, help="params file; without one the defaults hold")
    parser.add_argument("--case", metavar="JSON", help="this one case instead of those that the params plan")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases whose subject contains this")
    parser.add_argument("--again", action="store_true", help="also run what already has a record under this stack")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    parser.add_argument("--json", action="store_true", help="print the evidence as JSON lines")


def run(args: argparse.Namespace) -> int:
    """Evidence to the run's ledger, printed also where it was there already; 0 unless a kernel was wrong, crashed or hung."""
    from nvfp4lab import params
    from nvfp4lab.errors import LabError
    from nvfp4lab.kernels import plan, sweep_run
    from nvfp4lab.kernels.cases import Case
    from nvfp4lab.records import Verdict

    p = params.load(args.params) if args.params else params.Params()
    cases = [Case.from_json(args.case)] if args.case else plan.cases(p)
    matching = [case for case in cases if args.only in case.subject]
    if cases and not matching:
        raise LabError(f"--only {args.only} matches none of the {len(cases)} cases; --list shows them", exit_code=2)
    cases = matching
    if args.list:
        print("\n".join(case.subject for case in cases))
        return 0
    again, failed = args.again or bool(args.case), False
    recorded = [] if again else sweep_run.recorded(p, cases)
    if recorded and not args.json:
        print("\n".join(f"recorded before: {sweep_run.describe(evidence)}" for evidence in recorded))
    for evidence in itertools.chain(recorded, sweep_run.collect(p, cases, again)):
        failed |= evidence.verdict in (Verdict.WRONG, Verdict.CRASH, Verdict.HANG)
        if args.json:
            print(evidence.to_json(), flush=True)
    return 1 if failed else 0
