"""What the batch layer costs: our engine beside stock papermill, and 1,000 pieces of 50 ms over two workers.

Last line: one JSON object. `engine_vs_papermill`: our time over stock papermill's on 100 trivial cells, medians of
alternating runs. `local_coordination`, `ray_coordination`: share of the wall time that was not the pieces' own sleep.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
os.environ["PYTHONPATH"] = os.pathsep.join([sys.path[0], os.environ.get("PYTHONPATH", "")])

from nvfp4lab.batch import run as coordinator
from nvfp4lab.batch.executors import create
from nvfp4lab.batch.plan import Plan
from toy_pieces import toy

PIECES, PIECE_S, WORKERS, ROUNDS = 1000, 0.05, 2, 3


def notebook_seconds(folder: Path, engine: str | None) -> float:
    """Seconds for 100 trivial cells through `engine`."""
    import nbformat  # here: workers import this module again, and need none of these
    import papermill
    from nbformat.v4 import new_code_cell, new_notebook

    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [new_code_cell(f"x = {number}") for number in range(100)]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "in.ipynb")
    started = time.monotonic()
    papermill.execute_notebook(folder / "in.ipynb", folder / "out.ipynb", engine_name=engine, progress_bar=False)
    return time.monotonic() - started


def coordination(folder: Path, executor) -> float:
    """1 - ideal / measured for `PIECES` sleeping pieces; the pool is warmed up first."""
    coordinator.run(Plan("warm", (tuple(toy(-n, sleep_s=0.2) for n in range(1, 5)),)), folder / "warm", executor)
    plan = Plan("bench", (tuple(toy(number, sleep_s=PIECE_S) for number in range(PIECES)),))
    started = time.monotonic()
    summary = coordinator.run(plan, folder / "run", executor)
    assert summary.exit_code == 0, summary
    return 1 - PIECES * PIECE_S / WORKERS / (time.monotonic() - started)


def main() -> None:
    """Measure everything and print one JSON line."""
    numbers = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        times = {engine: [] for engine in (None, "nvfp4lab")}
        for _ in range(ROUNDS):
            for engine, seconds in times.items():
                seconds.append(notebook_seconds(folder, engine))
        medians = {engine: statistics.median(seconds) for engine, seconds in times.items()}
        numbers["engine_vs_papermill"] = round(medians["nvfp4lab"] / medians[None], 3)
        numbers["local_coordination"] = round(coordination(folder / "local", create("local", workers=WORKERS)), 4)
        import ray

        ray.init(num_cpus=WORKERS, log_to_driver=False, include_dashboard=False)
        numbers["ray_coordination"] = round(coordination(folder / "ray", create("ray", address="local")), 4)
        ray.shutdown()
    print(json.dumps(numbers))


if __name__ == "__main__":
    main()
