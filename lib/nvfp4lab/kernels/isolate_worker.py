"""What runs inside an isolated worker: one call, its report, and a probe of the device in the case's own context."""

import contextlib
import ctypes
import faulthandler
import functools
import os
import pickle
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from nvfp4lab.kernels import isolate_wire

_PR_SET_PDEATHSIG = 1


def _nobody_listens(kind: str, payload: Any) -> None:
    pass


_report: Callable[[str, Any], None] = _nobody_listens  # a worker sets its own


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Mark a stretch of a case as compiling, so that its time limit stands still.

    Needed only for compilers that run inside the process (NVRTC, MLIR); nvcc and its like are seen among the
    worker's descendants. Harmless outside a worker.
    """
    _report("compiling", True)
    try:
        yield
    finally:
        _report("compiling", False)


def run(token: bytes, channel_fd: int, output_fd: int) -> NoReturn:
    """Make this freshly forked process a worker, run the one call that comes down the channel, and end."""
    global _report
    _enter(output_fd)
    channel = socket.socket(fileno=channel_fd)
    _report = functools.partial(_send, channel, token)
    _report(*_answer(channel))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # no atexit, no destructors: those of a poisoned CUDA context may hang


def _send(channel: socket.socket, token: bytes, kind: str, payload: Any) -> None:
    channel.sendall(isolate_wire.pack(token, kind, payload))


def _enter(output_fd: int) -> None:
    """Own session, dies with the server, no core file, first to go when memory runs out, output to the file."""
    os.setsid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    for target in (1, 2):
        os.dup2(output_fd, target)
    os.close(output_fd)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    faulthandler.enable(file=2)


def _answer(channel: socket.socket) -> tuple[str, Any]:
    """Receive the call and make it; ("returned", (pickled value, seconds)) or ("raised", {...})."""
    started, phase = time.perf_counter(), "receiving the call"
    try:
        function, args = pickle.loads(_receive(channel))
        started, phase = time.perf_counter(), "the call"
        value = function(*args)
        run_s, phase = time.perf_counter() - started, "device probe after the call"
        probe_own_context()
        phase = "sending the result"
        return "returned", (pickle.dumps(value), run_s)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of a case are answers as well
        traceback.print_exc()
        types = [base.__name__ for base in type(error).__mro__]
        return "raised", {"types": types, "message": str(error), "phase": phase, "run_s": time.perf_counter() - started}


def _receive(channel: socket.socket) -> bytes:
    """The pickled call: eight bytes of length, then the body."""
    with channel.makefile("rb") as stream:
        return stream.read(int.from_bytes(stream.read(8), "big"))


def probe_own_context() -> None:
    """Raise if the CUDA context of this process is unusable: surfaces the asynchronous faults of a 'successful' call."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return
    torch.cuda.synchronize()
    ones = torch.ones(1024, device="cuda")
    if float((ones + ones).sum()) != 2048.0:
        raise RuntimeError("the device gives a wrong sum")
