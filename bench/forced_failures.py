"""What is left after servers, and the labs that started them, were made to fail in every way, many times each.

    python bench/forced_failures.py [--repeats 50] [--gpu] [--limit-s 115] [--workers N]

The kinds are those of tests/launch_kinds.py. They run in rounds, each kind once a round, several at a time, until the repeats
are done or the time is over. With `--gpu` every process of every server holds memory of the first visible GPU: first some
kinds alone on the card, where the lab's own count must be back to nothing, two of them through torch; then the rounds, judged by
NVML's list of processes and its total. The counting is checked first: a planted survivor must be seen.

The last line of stdout is one JSON object; the exit code is 1 if anything was left, went another way than expected, or not
every kind had one turn.
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import launch_kinds
from launch_kinds import FAKE, KINDS, ports_left, seen, survivors
from nvfp4lab.batch.progress import Progress
from nvfp4lab.server import processes, processes_gpu
from nvfp4lab.stack import capture

PORT_TAKEN = "in use by another process"  # the lab's own words
HELD_MIB = 64
SLACK_MIB = 16.0  # of the whole card: the driver's own bookkeeping moves by a few MiB
ALONE = ("ignores_term", "killed_at_start", "out_of_memory", "worker_dies", "escapes_and_ignores_term", "lab killed", "spins")
THROUGH_TORCH = ("escapes_and_ignores_term", "killed_by_the_system")


@dataclasses.dataclass(frozen=True)
class Turn:
    """One forced failure.

    surprise: what was not as expected, "" if all was. left: processes, ports, open records. races: how often another server
    took the fresh port first, which the lab noticed, so that the turn was taken again.
    """

    kind: str
    surprise: str
    left: tuple[int, int, int]
    races: int = 0


@dataclasses.dataclass(frozen=True)
class Card:
    """The GPU under test: its name for CUDA_VISIBLE_DEVICES, NVML's handle, the path of the driver library."""

    name: str
    library: str

    @classmethod
    def first(cls) -> "Card":
        """Raises SystemExit where there is none."""
        found = processes_gpu.visible()
        if not found:
            raise SystemExit("--gpu: NVML shows no GPU here (driver, or the package nvidia-ml-py, missing)")
        ctypes.CDLL("libcuda.so.1")
        maps = Path("/proc/self/maps").read_text()
        return cls(found[0][0], re.search(r"\S*/libcuda\.so\S*", maps)[0])  # a path, for a process without LD_LIBRARY_PATH

    def held_by(self) -> set[int]:
        """Pids that NVML lists on the card."""
        [(_, handle)] = processes_gpu.visible({processes_gpu.VISIBLE: self.name})
        return {process.pid for process in processes_gpu.nvml().nvmlDeviceGetComputeRunningProcesses(handle)}

    def used_mib(self) -> float:
        return processes_gpu.used_mib({processes_gpu.VISIBLE: self.name})[0]

    def argument(self, library: str = "") -> str:
        """What a fake server is told."""
        return f"{self.name}:{HELD_MIB}:{library or self.library}"


def one(name: str, folder: str, gpu: str, is_alone: bool) -> Turn:
    """Make one fail and look what is left. Alone, the lab counts the GPU's memory too; else it is shown no GPU."""
    if gpu and not is_alone:
        os.environ[processes_gpu.VISIBLE] = ""  # others' memory on the same card would look like this server's
    kind, surprise, races = KINDS[name], "", 0
    Path(folder).mkdir(parents=True)
    try:
        while PORT_TAKEN in (ended := kind.act(kind, Path(folder), gpu)).reason and races < 5:
            races += 1
        surprise = "" if kind.is_right(ended) else str(ended)
    except Exception as error:  # a turn that fails must not end the figure; it is counted and printed
        surprise = repr(error)
    left = len(survivors(Path(folder))), len(ports_left(Path(folder))), len(processes.leftovers(folder))
    return Turn(name, surprise, left, races)


def rounds(root: Path, repeats: int, workers: int, deadline_s: float, gpu: str) -> Iterator[Turn]:
    """Every kind `repeats` times, `workers` at a time; no new turn begins after `deadline_s` of time.monotonic()."""
    turns = ((name, str(root / f"{index}-{name.replace(' ', '_')}")) for index in range(repeats) for name in KINDS)
    spawn = multiprocessing.get_context("spawn")  # NVML is open here and does not survive a fork
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        running: set[concurrent.futures.Future] = set()
        while True:
            while len(running) < workers and time.monotonic() < deadline_s and (turn := next(turns, None)):
                running.add(pool.submit(one, *turn, gpu, False))
            if not running:
                return
            done, running = concurrent.futures.wait(running, return_when=concurrent.futures.FIRST_COMPLETED)
            yield from (future.result() for future in done)


@contextlib.contextmanager
def planted(folder: Path, gpu: str) -> Iterator[None]:
    """A server that nobody ends, while the block runs."""
    folder.mkdir()
    flags = [] if gpu.endswith(":torch") else ["-I", "-S"]
    left = subprocess.Popen([sys.executable, *flags, str(FAKE), "0", "ignores_term", str(folder), gpu], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not seen(folder, "port") and left.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        yield
    finally:
        left.send_signal(signal.SIGKILL)
        left.wait()


def check_the_counting(root: Path, card: Card | None) -> bool:
    """Raises SystemExit if a planted survivor is not seen. Whether NVML lists the GPU's processes by a pid known here."""
    before_mib, by_process = (card.used_mib() if card else 0.0), False
    with planted(root, card.argument() if card else ""):
        if len(survivors(root)) != 1 or len(ports_left(root)) != 1:
            raise SystemExit("a planted survivor and its port are not seen: nothing that this counts would mean anything")
        if card and (held := card.used_mib() - before_mib) < HELD_MIB:
            raise SystemExit(f"a planted process holds {HELD_MIB} MiB, and the GPU shows {held:.0f} more")
        by_process = bool(card and card.held_by())
    return by_process


def gpu_left(card: Card, before: set[int], before_mib: float) -> tuple[int, float]:
    """Processes and MiB of the card above what was there before, after at most 5 s for the driver to give them back."""
    deadline = time.monotonic() + 5
    while (card.held_by() - before or card.used_mib() - before_mib > SLACK_MIB) and time.monotonic() < deadline:
        time.sleep(0.1)
    return len(card.held_by() - before), round(max(0.0, card.used_mib() - before_mib), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--gpu", action="store_true", help="every process of every server holds GPU memory")
    parser.add_argument("--limit-s", type=float, default=115.0, help="no turn begins later than this, less 10 s")
    parser.add_argument("--workers", type=int, default=2 * (os.cpu_count() or 1))
    args = parser.parse_args()
    began_s = time.monotonic()
    card = Card.first() if args.gpu else None
    turns: list[Turn] = []
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        before, before_mib = (card.held_by(), card.used_mib()) if card else (set(), 0.0)
        by_process = check_the_counting(root / "planted", card)
        alone = [(name, "") for name in ALONE] + [(name, "torch") for name in THROUGH_TORCH] if card else []
        with Progress(len(alone) + args.repeats * len(KINDS), "forced failures") as progress:
            for index, (name, library) in enumerate(alone):
                turns.append(one(name, str(root / f"alone-{index}"), card.argument(library), is_alone=True))
                progress.step(name)
            count_alone = len(turns)
            deadline_s = began_s + args.limit_s - 10
            for turn in rounds(root / "rounds", args.repeats, args.workers, deadline_s, card.argument() if card else ""):
                turns.append(turn)
                progress.step(turn.kind)
        figures = {
            "processes_left": max(sum(turn.left[0] for turn in turns), len(survivors(root))),
            "ports_left": max(sum(turn.left[1] for turn in turns), len(ports_left(root))),
            "records_left_open": sum(turn.left[2] for turn in turns),
        }
        if card:
            figures["gpu_processes_left"], figures["gpu_mib_left"] = gpu_left(card, before, before_mib)
            figures |= {"gpu_allocations": len(seen(root, "gpu")), "gpu_alone": count_alone, "gpu_by_process": by_process}
        figures["ports_seen"] = len(seen(root, "port"))
    repeats = Counter(turn.kind for turn in turns[count_alone:])
    surprises = [f"{turn.kind}: {turn.surprise}" for turn in turns if turn.surprise]
    figures["port_races"] = sum(turn.races for turn in turns)
    done = {"kinds": len(KINDS), "repeats": min(repeats[name] for name in KINDS), "forced_failures": len(turns)}
    print(f"machine: {capture().machine}; {launch_kinds.__file__} has the kinds", file=sys.stderr)
    print(json.dumps(done | figures | {"surprises": surprises, "seconds": round(time.monotonic() - began_s, 1)}))
    left = any(figures[name] for name in figures if name.endswith("_left") and name != "gpu_mib_left")
    is_memory_left = figures.get("gpu_mib_left", 0.0) > SLACK_MIB
    sys.exit(1 if left or is_memory_left or figures["records_left_open"] or surprises or not done["repeats"] else 0)


if __name__ == "__main__":
    main()
