"""One worker process on this host: told what to do, and heard, through a pipe that nobody shares with it."""

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil

from nvfp4lab.batch import cleanup
from nvfp4lab.batch import piece as pieces_module
from nvfp4lab.batch.parent_death import die_with_parent
from nvfp4lab.batch.piece import Piece, Result
from nvfp4lab.errors import LabError
from nvfp4lab.records import Verdict
from nvfp4lab.server.processes_gpu import VISIBLE

STARTS = 5
START_TIMEOUT_S = 180  # imports from a cold network disk
ATTEMPTS = 3
FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM})  # exit statuses that no process gives itself by mistake
CONTEXT = multiprocessing.get_context("spawn")  # a fork would copy the coordinator's threads, locks and GPU state


class WorkerDied(Exception):
    """The process ended before it answered. exit_status: negative for a signal."""

    def __init__(self, exit_status: int | None):
        super().__init__(f"exit status {exit_status}")
        self.exit_status = exit_status


class WorkerStopped(Exception):
    """Whoever gave out the work wants no answer any more."""


class Worker:
    """Executes one piece at a time; its process is started again after it died.

    stop: file descriptor that becomes readable when no answer is wanted any more. For one thread, which must live as
    long as the process: the system kills the process with the thread that started it.
    """

    def __init__(self, stop: int):
        self._stop = stop
        self._start()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        self.end()

    def execute(self, piece: Piece, run_dir: Path, gpus: list[str]) -> Result:
        """What `piece.execute` returns or raises. gpus: names for CUDA_VISIBLE_DEVICES; none: as the coordinator's own.

        Raises TimeoutError past the piece's limit and WorkerDied, both with a new process ready; WorkerStopped.
        """
        try:
            self._pipe.send((piece, run_dir, gpus))
            ready = wait([self._pipe, self._stop], piece.timeout_s)
            if self._pipe in ready:
                outcome = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise WorkerDied(self._replace()) from None
        if self._stop in ready:
            raise WorkerStopped
        if not ready:
            self._replace()
            raise TimeoutError
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def end(self) -> int | None:
        """Kill the process and its children, a notebook's kernel among them; returns its exit status."""
        children = []
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._process.is_alive():  # else its pid may be another's by now
                children = psutil.Process(self._process.pid).children()
        self._process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        self._process.join()
        self._pipe.close()
        return self._process.exitcode

    def _start(self) -> None:
        """A new process, ready to begin: one that is killed before has cost no piece an attempt."""
        for _ in range(STARTS):
            self._pipe, theirs = CONTEXT.Pipe()
            self._process = CONTEXT.Process(target=_serve, args=(theirs,))
            self._process.start()
            theirs.close()  # so that the end of the process is the end of the pipe
            ready = wait([self._pipe, self._stop], START_TIMEOUT_S)
            with contextlib.suppress(EOFError, ConnectionError):
                if ready == [self._pipe]:
                    self._pipe.recv()
                    return
            status = self.end()
            if self._stop in ready:
                raise WorkerStopped
        raise LabError(f"a worker process ended {STARTS} times before it could begin, last with exit status {status}", exit_code=3)

    def _replace(self) -> int | None:
        status = self.end()
        self._start()
        return status


def execute_in(worker: Worker, piece: Piece, run_dir: Path, gpus: list[str]) -> Result:
    """The result of `piece`, also when it runs past its limit or its process dies. Raises what `Worker.execute` raises else."""
    statuses = []
    while len(statuses) < ATTEMPTS:
        try:
            return worker.execute(piece, run_dir, gpus)
        except TimeoutError:
            reason = f"ran past its limit of {piece.timeout_s} s and was ended"
            return cleanup.publish_failure(piece, run_dir, Verdict.HANG, reason)
        except WorkerDied as death:
            statuses.append(death.exit_status)
            for attempt in pieces_module.unfinished_attempts(run_dir, piece):
                cleanup.end_servers_of(attempt)
    if set(statuses) <= FROM_OUTSIDE:  # nothing is published: it did not fail, it was stopped
        reason = f"its process was killed {ATTEMPTS} times (by an operator, or the system short of memory); --resume runs it again"
        return Result(piece.name, piece.digest, Verdict.NOT_RUN, reason, 0.0)
    reason = f"its process died {ATTEMPTS} times, the last time with exit status {statuses[-1]}"
    return cleanup.publish_failure(piece, run_dir, Verdict.CRASH, reason)


def execute_limited(piece: Piece, run_dir: Path) -> Result:
    """`piece.execute` for a task of another engine: what has a limit runs in a process of its own, which can be ended."""
    if piece.timeout_s is None:
        return pieces_module.execute(piece, run_dir)
    stop, never = os.pipe()
    try:
        with Worker(stop) as worker:
            return execute_in(worker, piece, run_dir, [])
    finally:
        os.close(stop)
        os.close(never)


def _serve(pipe: Connection) -> None:
    """In the worker: execute what comes through `pipe` until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the coordinator stops workers itself
    die_with_parent()  # a killed coordinator leaves nothing at work
    visible = os.environ.get(VISIBLE)
    with contextlib.suppress(EOFError):
        pipe.send(None)
        while True:
            piece, run_dir, gpus = pipe.recv()
            os.environ.pop(VISIBLE, None)
            if gpus or visible is not None:
                os.environ[VISIBLE] = ",".join(gpus) or visible
            try:
                outcome = pieces_module.execute(piece, run_dir)
            except Exception as error:  # the machine's fault, as no space is: for the coordinator to judge
                outcome = error
            pipe.send(outcome)
