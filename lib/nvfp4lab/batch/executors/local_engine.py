"""Processes on this machine, by Pebble: a worker that dies or runs past its limit costs its own piece only."""

import concurrent.futures
import ctypes
import multiprocessing
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import psutil
from pebble import ProcessExpired, ProcessPool

from nvfp4lab.batch import piece as pieces_module
from nvfp4lab.batch.piece import Piece, Result
from nvfp4lab.records import Verdict
from nvfp4lab.server import processes_gpu

ATTEMPTS = 3  # a worker may be killed from outside (OOM killer, an operator); a piece that kills it thrice is at fault
PR_SET_PDEATHSIG = 1


class LocalExecutor:
    """workers: processes at once. The GPUs that we may use ourselves are handed out through CUDA_VISIBLE_DEVICES."""

    def __init__(self, workers: int):
        self.workers = workers

    def run(self, pieces: Sequence[Piece], run_dir: Path) -> Iterator[Result]:
        """See `Executor.run`."""
        pool = ProcessPool(max_workers=self.workers, context=multiprocessing.get_context("spawn"), initializer=_die_with_parent)
        try:
            yield from _Schedule(pool, run_dir, self.workers).run(list(pieces))
            pool.close()
        finally:
            pool.stop()  # kills what still runs: on Ctrl-C, on a closed iterator, on an error
            pool.join()


class _Schedule:
    """Who runs now, who waits, which GPUs are free."""

    def __init__(self, pool: ProcessPool, run_dir: Path, workers: int):
        self.pool, self.run_dir = pool, run_dir
        self.free_gpus = [name for name, _ in processes_gpu.visible()]
        self.free_memory_gib = psutil.virtual_memory().available / 2**30
        self.queue_limit = 64 * workers  # enough that no worker waits while we rewrite what the run folder shows
        self.running: dict[Future, tuple[Piece, list[str]]] = {}
        self.failures: dict[str, int] = {}

    def run(self, waiting: list[Piece]) -> Iterator[Result]:
        while waiting or self.running:
            waiting = [piece for piece in waiting if not self._start(piece)]
            if not self.running:
                yield from (_refusal(piece) for piece in waiting)
                return
            finished, _ = concurrent.futures.wait(self.running, return_when=concurrent.futures.FIRST_COMPLETED)
            for future in finished:
                piece, result = self._collect(future)
                if result is None:
                    waiting.append(piece)
                else:
                    yield result

    def _start(self, piece: Piece) -> bool:
        fits = piece.needs.gpus <= len(self.free_gpus) and piece.needs.memory_gib <= self.free_memory_gib
        if not fits or len(self.running) >= self.queue_limit:
            return False
        gpus, self.free_gpus = self.free_gpus[: piece.needs.gpus], self.free_gpus[piece.needs.gpus :]
        self.free_memory_gib -= piece.needs.memory_gib
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
        future = self.pool.schedule(_execute, args=[piece, self.run_dir, environment], timeout=piece.timeout_s)
        self.running[future] = piece, gpus
        return True

    def _collect(self, future: Future) -> tuple[Piece, Result | None]:
        """The piece and its result; None: its worker died and it deserves another attempt."""
        piece, gpus = self.running.pop(future)
        self.free_gpus += gpus
        self.free_memory_gib += piece.needs.memory_gib
        try:
            return piece, future.result()
        except concurrent.futures.TimeoutError:
            reason = f"ran past its limit of {piece.timeout_s} s and was ended"
            return piece, pieces_module.publish_failure(piece, self.run_dir, Verdict.HANG, reason)
        except ProcessExpired as death:
            failures = self.failures[piece.digest] = self.failures.get(piece.digest, 0) + 1
            if failures < ATTEMPTS:
                return piece, None
            reason = f"its process died {failures} times, the last time with exit status {death.exitcode}"
            return piece, pieces_module.publish_failure(piece, self.run_dir, Verdict.CRASH, reason)


def _refusal(piece: Piece) -> Result:
    reason = f"needs {piece.needs.gpus} GPUs and {piece.needs.memory_gib:g} GiB of memory, which this machine does not have free"
    return Result(piece.name, piece.digest, Verdict.NOT_RUN, reason, 0.0)


def _die_with_parent() -> None:
    """In a worker: be killed when the coordinator is, so that a killed run leaves nothing at work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the coordinator stops workers itself
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _execute(piece: Piece, run_dir: Path, environment: Mapping[str, str]) -> Result:
    os.environ.update(environment)
    return pieces_module.execute(piece, run_dir)


def create(workers: int | None = None) -> LocalExecutor:
    """workers: processes at once; None: half the cores, since a notebook's kernel and its server want one each."""
    return LocalExecutor(workers or max(1, (os.cpu_count() or 1) // 2))
