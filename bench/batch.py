"""What the batch layer costs: our engine beside stock papermill, and 1,000 pieces of 50 ms over two workers.

Last line: one JSON object. `engine_vs_papermill`: our time over stock papermill's on 100 trivial cells. `local_coordination`,
`ray_coordination`: share of the wall time, from the call to the written index, in which a worker was not asked to sleep:
1 - pieces x 50 ms / workers / wall, so that what the sleep itself overshoots (`sleep_overshoot`, the same share) counts as
coordination too. Medians of `ROUNDS` alternating rounds; `*_rounds` has all of them, `load_1min` says how busy the machine was.

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


def coordination(run_dir: Path, executor, pieces: int = PIECES) -> float:
    """1 - ideal / measured for `pieces` pieces that sleep."""
    from nvfp4lab.batch import run as coordinator
    from nvfp4lab.batch.plan import Plan
    from toy_pieces import toy

    plan = Plan("bench", (tuple(toy(number, sleep_s=PIECE_S) for number in range(pieces)),))
    started = time.monotonic()
    summary = coordinator.run(plan, run_dir, executor)
    assert summary.exit_code == 0, summary
    return 1 - pieces * PIECE_S / WORKERS / (time.monotonic() - started)


def sleep_overshoot(times: int = 100) -> float:
    """What `coordination` would say of workers that do nothing but sleep."""
    started = time.monotonic()
    for _ in range(times):
        time.sleep(PIECE_S)
    return 1 - times * PIECE_S / (time.monotonic() - started)


def main() -> None:
    """Measure everything and print one JSON line."""
    import ray

    from nvfp4lab.batch.executors import create

    measured: dict[str, list[float]] = {name: [] for name in ("stock", "ours", "local", "ray", "overshoot")}
    load = os.getloadavg()[0]
    ray.init(num_cpus=WORKERS, log_to_driver=False, include_dashboard=False)
    engines = {"local": create("local", workers=WORKERS), "ray": create("ray", address="local")}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        coordination(folder / "warm", engines["ray"], pieces=8)  # a cluster is there before the batch; local workers start with it
        for number in range(ROUNDS):
            measured["stock"].append(notebook_seconds(folder, None))
            measured["ours"].append(notebook_seconds(folder, "nvfp4lab"))
            measured["overshoot"].append(sleep_overshoot())
            for name, executor in engines.items():
                measured[name].append(coordination(folder / f"{name}-{number}", executor))
        ray.shutdown()
    median = {name: statistics.median(values) for name, values in measured.items()}
    print(
        json.dumps(
            {
                "engine_vs_papermill": round(median["ours"] / median["stock"], 3),
                "local_coordination": round(median["local"], 4),
                "ray_coordination": round(median["ray"], 4),
                "sleep_overshoot": round(median["overshoot"], 4),
                "local_rounds": [round(share, 4) for share in measured["local"]],
                "ray_rounds": [round(share, 4) for share in measured["ray"]],
                "load_1min": round(load, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
