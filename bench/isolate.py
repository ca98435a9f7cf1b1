"""What isolation costs: one empty case, and a CPU sweep of real cases.

    python bench/isolate.py [--cases 200] [--workers 2]

The last line of stdout is one JSON object: milliseconds that isolation adds to a case (median and best of 30, torch
loaded, nothing computed), and seconds of a sweep of reference and emulated kernels with their verdicts, the start of the
workers included, the gate's certificate not.
"""

import argparse
import collections
import json
import operator
import sys
import tempfile
import time
from pathlib import Path

from nvfp4lab.batch.progress import Progress
from nvfp4lab.kernels import plan, sweep_run
from nvfp4lab.kernels.isolate import Isolator
from nvfp4lab.params import Params
from nvfp4lab.records import Target
from nvfp4lab.stack import capture

CPU = Target("cpu", present=True)


def overhead_ms(folder: Path, rounds: int = 30) -> list[float]:
    """Wall time of isolated empty calls, sorted, after one to start the server."""
    with Isolator(folder, device_probe=None) as isolator:
        isolator.run(operator.add, 1, 1)
        return sorted(1e3 * isolator.run(operator.add, 1, 1).wall_s for _ in range(rounds))


def sweep_s(folder: Path, count: int, workers: int) -> tuple[float, dict[str, int]]:
    """Seconds of a sweep of `count` CPU cases, and how many ended how."""
    p = Params(run_dir=str(folder), kernel_workers=workers, kernel_seeds=20)
    cases = [case for case in plan.cases(p, CPU) if case.backend.startswith(("torch.", "emulation."))]
    step = max(1, len(cases) // count)
    chosen = cases[::step][:count]
    started = time.monotonic()
    with Progress(len(chosen), "sweep") as progress:
        verdicts = []
        for row in sweep_run.sweep_of(p, CPU, capture())(chosen):
            verdicts.append(str(row.verdict))
            progress.step(row.subject)
    return time.monotonic() - started, dict(collections.Counter(verdicts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        empty = overhead_ms(Path(folder))
        seconds, verdicts = sweep_s(Path(folder), args.cases, args.workers)
    print(f"machine: {capture().machine}", file=sys.stderr)
    print(
        json.dumps(
            {
                "overhead_ms_median": round(empty[len(empty) // 2], 1),
                "overhead_ms_best": round(empty[0], 1),
                "sweep_cases": sum(verdicts.values()),
                "sweep_s": round(seconds, 1),
                "verdicts": verdicts,
            }
        )
    )


if __name__ == "__main__":
    main()
