"""Processes on this machine: a worker that dies or runs past its limit, at whatever moment, costs its own piece only.

Every slot has one worker with a pipe of its own. Pools whose workers share a queue (concurrent.futures, Pebble, joblib)
guard it by a lock, and a worker killed while it holds that lock stops all the others.
"""

import os
import queue
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from nvfp4lab.batch.executors.local_worker import Worker, WorkerStopped, execute_in
from nvfp4lab.batch.piece import Piece, Result
from nvfp4lab.errors import LabError
from nvfp4lab.records import Verdict
from nvfp4lab.server import processes_gpu


class LocalExecutor:
    """workers: processes at once. The GPUs that we may use ourselves are handed out through CUDA_VISIBLE_DEVICES."""

    def __init__(self, workers: int):
        self.workers = workers

    def run(self, pieces: Sequence[Piece], run_dir: Path) -> Iterator[Result]:
        """See `Executor.run`."""
        stop_reader, stop_writer = os.pipe()  # closing the writer is seen by every slot, whatever it waits for
        line = _Line(pieces)
        outcomes: queue.SimpleQueue[Result | BaseException] = queue.SimpleQueue()
        slots = [
            threading.Thread(target=_slot, args=(line, run_dir, stop_reader, outcomes), name=f"slot-{number}", daemon=True)
            for number in range(min(self.workers, len(pieces)))
        ]
        for slot in slots:
            slot.start()
        try:
            for _ in pieces:
                outcome = outcomes.get()
                if isinstance(outcome, BaseException):
                    raise outcome
                yield outcome
        finally:  # at the end, on Ctrl-C, on a closed iterator, on an error: kills what still runs
            line.clear()
            os.close(stop_writer)
            for slot in slots:
                slot.join()
            os.close(stop_reader)


class _Line:
    """The pieces that wait, and the GPUs and the memory that are free for them."""

    def __init__(self, pieces: Sequence[Piece]):
        self._waiting = list(pieces)
        self._running = 0
        self._free_gpus = [name for name, _ in processes_gpu.visible()]
        self._free_memory_gib = psutil.virtual_memory().available / 2**30
        self._changed = threading.Condition()

    def take(self) -> tuple[Piece, list[str] | None] | None:
        """The next piece that fits with the names of its GPUs, once there is one; None when none waits.

        Without GPUs (None instead of a list): it needs more than this machine can ever free.
        """
        with self._changed:
            while self._waiting:
                for number, piece in enumerate(self._waiting):
                    if piece.needs.gpus <= len(self._free_gpus) and piece.needs.memory_gib <= self._free_memory_gib:
                        self._running += 1
                        self._free_memory_gib -= piece.needs.memory_gib
                        gpus, self._free_gpus = self._free_gpus[: piece.needs.gpus], self._free_gpus[piece.needs.gpus :]
                        return self._waiting.pop(number), gpus
                if not self._running:
                    return self._waiting.pop(0), None
                self._changed.wait()
            return None

    def give_back(self, piece: Piece, gpus: list[str]) -> None:
        """What `take` gave is free again."""
        with self._changed:
            self._running -= 1
            self._free_memory_gib += piece.needs.memory_gib
            self._free_gpus += gpus
            self._changed.notify_all()

    def free(self) -> tuple[int, float]:
        """GPUs and GiB of memory that no piece has."""
        with self._changed:
            return len(self._free_gpus), self._free_memory_gib

    def clear(self) -> None:
        """Nothing waits any more."""
        with self._changed:
            self._waiting.clear()
            self._changed.notify_all()


def _slot(line: _Line, run_dir: Path, stop: int, outcomes: queue.SimpleQueue) -> None:
    """One slot's thread: executes pieces one after the other until none waits or the other end of `stop` is closed."""
    try:
        with Worker(stop) as worker:
            while (taken := line.take()) is not None:
                piece, gpus = taken
                if gpus is None:
                    outcomes.put(_refusal(piece, line))
                    continue
                result = execute_in(worker, piece, run_dir, gpus)
                line.give_back(piece, gpus)
                outcomes.put(result)
    except WorkerStopped:
        pass
    except BaseException as error:  # raised again where the results are read: no slot ends unnoticed
        outcomes.put(error)


def _refusal(piece: Piece, line: _Line) -> Result:
    free_gpus, free_gib = line.free()
    wanted = f"{_gpus(piece.needs.gpus)} and " if piece.needs.gpus else ""
    wanted += f"{piece.needs.memory_gib:g} GiB of memory"
    reason = f"needs {wanted}; {_gpus(free_gpus)} and {free_gib:.1f} GiB are free on this machine"
    return Result(piece.name, piece.digest, Verdict.NOT_RUN, reason, 0.0)


def _gpus(count: int) -> str:
    return "1 GPU" if count == 1 else f"{count} GPUs"


def create(workers: int | None = None) -> LocalExecutor:
    """workers: processes at once; None: half the cores, since a notebook's kernel and its server want one each.

    Raises LabError for fewer than one.
    """
    if workers is not None and workers < 1:
        raise LabError(f"{workers} workers do nothing; there must be at least 1", exit_code=2)
    return LocalExecutor(workers or max(1, (os.cpu_count() or 1) // 2))
