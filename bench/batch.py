"""What the batch layer costs: our engine beside stock papermill, and 1,000 pieces of 50 ms over two workers.

Last line: one JSON object. `engine_vs_papermill`: our time over stock papermill's on 100 trivial cells. `local_coordination`,
`ray_coordination`: share of the wall time, from the call to the written index, in which a worker did not sleep: 1 - sum of the
sleeps as the pieces measured them / workers / wall. `*_nominal`: the same with 50 ms for each sleep, so that what a sleep
overshoots counts too. Medians of `ROUNDS` alternating rounds; `*_rounds` has all, `load_1min` says how busy the machine was.

All files are deleted at the end only: ext4 takes a millisecond to make a file where thousands have just been deleted.
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

PIECES, PIECE_S, WORKERS, ROUNDS = 1000, 0.05, 2, 3


def notebook_seconds(folder: Path, engine: str | None) -> float:
    """Seconds for 100 trivial cells through `engine`."""
    import nbformat  # here and below: workers import this module again, and need none of these
    import papermill
    from nbformat.v4 import new_code_cell, new_notebook

    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    cells = [new_code_cell(f"x = {number}") for number in range(100)]
    nbformat.write(new_notebook(cells=cells, metadata={"kernelspec": kernel}), folder / "in.ipynb")
    started = time.monotonic()
    papermill.execute_notebook(folder / "in.ipynb", folder / "out.ipynb", engine_name=engine, progress_bar=False)
    return time.monotonic() - started


def coordination(run_dir: Path, executor, pieces: int = PIECES) -> tuple[float, float]:
    """Share of coordination in a batch of `pieces` pieces that sleep, by measured and by nominal sleep."""
    from nvfp4lab.batch import run as coordinator
    from nvfp4lab.batch.plan import Plan
    from toy_pieces import toy

    plan = Plan("bench", (tuple(toy(number, "nap", sleep_s=PIECE_S) for number in range(pieces)),))
    started = time.monotonic()
    summary = coordinator.run(plan, run_dir, executor)
    wall_s = time.monotonic() - started
    assert summary.exit_code == 0, summary
    slept_s = sum(float(result.reason) for result in summary.results)
    return 1 - slept_s / WORKERS / wall_s, 1 - pieces * PIECE_S / WORKERS / wall_s


def main() -> None:
    """Measure everything and print one JSON line."""
    import ray

    from nvfp4lab.batch.executors import create

    ray.init(num_cpus=WORKERS, log_to_driver=False, include_dashboard=False)
    executors = {"local": create("local", workers=WORKERS), "ray": create("ray", address="local")}
    notebooks: dict[str | None, list[float]] = {None: [], "nvfp4lab": []}
    shares: dict[str, list[tuple[float, float]]] = {name: [] for name in executors}
    load_1min = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        coordination(folder / "warm", executors["ray"], pieces=8)  # a cluster is there before the batch; local workers start in it
        for number in range(ROUNDS):
            for engine, seconds in notebooks.items():
                seconds.append(notebook_seconds(folder, engine))
            for name, executor in executors.items():
                shares[name].append(coordination(folder / f"{name}-{number}", executor))
        ray.shutdown()
    numbers = {"engine_vs_papermill": round(statistics.median(notebooks["nvfp4lab"]) / statistics.median(notebooks[None]), 3)}
    for name, rounds in shares.items():
        measured, nominal = zip(*rounds, strict=True)
        numbers[f"{name}_coordination"] = round(statistics.median(measured), 4)
        numbers[f"{name}_nominal"] = round(statistics.median(nominal), 4)
        numbers[f"{name}_rounds"] = [round(share, 4) for share in measured]
    print(json.dumps(numbers | {"load_1min": round(load_1min, 2)}))


if __name__ == "__main__":
    main()
