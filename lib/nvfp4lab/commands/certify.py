"""Would our gate notice a broken kernel? Kill matrix and false alarms of the gate, beside the published checks."""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help="a few seeds for the false-alarm count instead of 200; for beside a kernel run"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Exit code 0: the gate is sound; 1: a fault survived or a sound kernel was blamed."""
    from nvfp4lab.batch.progress import passing
    from nvfp4lab.kernels import certificate

    result = certificate.certify(seeds=certificate.QUICK_SEEDS if args.quick else certificate.SEEDS, progress=passing)
    if args.json:
        print(json.dumps(result.to_json()))
    else:
        print(_table(result))
    return 0 if result.sound else 1


def _table(result) -> str:
    from nvfp4lab.kernels.published import PUBLISHED

    def mark(kill) -> str:
        return "not judged" if kill.fault.indistinguishable else "killed" if kill.killed else "SURVIVED"

    totals = {gate.name: sum(kill.fault.op in gate.ops for kill in result.judged) for gate in PUBLISHED}
    killed = len(result.judged) - len(result.survivors)
    return "\n".join(
        [
            *(f"{mark(kill):10} {kill.fault.op:5} {kill.fault.name:50.50} {kill.needs}" for kill in result.kills),
            "\nLet through by published checks:",
            *(
                f"  {gate.name:18} {len(result.published[gate.name]):3} of {totals[gate.name]}   {gate.criterion}"
                for gate in PUBLISHED
            ),
            f"\n{killed} of {len(result.judged)} faults killed; "
            f"{len(result.false_alarms)} false alarms in {result.trials} trials; {result.seconds:.1f} s",
            *(f"  false alarm: {alarm}" for alarm in result.false_alarms[:5]),
            "The gate is " + ("sound." if result.sound else "NOT sound and must not be used."),
        ]
    )
