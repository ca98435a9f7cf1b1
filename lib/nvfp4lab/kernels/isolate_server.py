"""The fork server of `isolate.Isolator`: imports what every case needs, never touches CUDA, forks one worker per case.

A fork costs milliseconds where a fresh interpreter with torch costs seconds. `multiprocessing`'s own fork server is
not used: it re-imports the caller's `__main__` in every child (pytest, a notebook kernel, a script with side effects),
shares one global server with all other code in the process, and has no answer to grandchildren that outlive a worker.
This server is a child subreaper: whatever a case leaves behind becomes its child and is killed before the next case.

Control socket (SEQPACKET, JSON). First the lab sends {"preload": [...], "wishes": [...], "path": [...]}, answered
{"ready": pid, "missing": {wish: why}}, {"error": ...}, or {"spoilt_by": module, "why": ...} when a wish touched CUDA or
started a process: this one is then of no use. Then per case {"token": hex} with two descriptors (channel of the call and
its result, output file), answered {"pid"} and, when the worker has ended, {"exit", "peak_rss_bytes", "left_behind"}. A
message while a case runs means: kill it. End of file ends the server.
"""

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys

from nvfp4lab.kernels import isolate_pages, isolate_proc, isolate_worker

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.005
_CUDA_ERROR_NOT_INITIALIZED = 3


def main(control_fd: int) -> None:
    """Serve until the lab closes its end of the control socket or dies."""
    control = socket.socket(fileno=control_fd)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the lab's to handle; it ends the case by itself
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    config = json.loads(control.recv(1 << 20))
    sys.path[:] = config["path"]
    _say(control, _preload(config["preload"], config["wishes"]))
    while True:
        request, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not request:
            break
        if not descriptors:
            continue  # a kill that came after its case had ended
        _serve_case(control, json.loads(request), *descriptors)


def _preload(modules: list[str], wishes: list[str]) -> dict:
    missing = {}
    for module in [*modules, *wishes]:
        why = _import(module)
        if unfit := _unfit(module):
            print(unfit, file=sys.stderr)
            return {"error": unfit} if module in modules else {"spoilt_by": module, "why": unfit}
        if why and module in modules:
            return {"error": why}
        if why:
            missing[module] = why
            print(why, file=sys.stderr)  # the server's log
    isolate_pages.collapse()
    return {"ready": os.getpid(), "missing": missing}


def _import(module: str) -> str | None:
    """Why `module` cannot be imported; None when it is."""
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a package does on import is the answer
        return f"importing {module} in the fork server failed: {type(error).__name__}: {error}"
    return None


def _unfit(module: str) -> str | None:
    """What the import of `module` did to this process that makes it useless for forking workers."""
    if _cuda_touched():
        return f"{module} initialises CUDA on import; a forked worker could not use the GPU"
    if _end_children():
        return f"{module} starts processes on import; they would count as left behind by the first case"
    return None


def _cuda_touched() -> bool:
    """Whether torch or anybody else has initialised the CUDA driver in this process."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return True
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no driver
        return False
    context = ctypes.c_void_p()
    return driver.cuCtxGetCurrent(ctypes.byref(context)) != _CUDA_ERROR_NOT_INITIALIZED


def _say(control: socket.socket, message: dict) -> None:
    control.send(json.dumps(message).encode())


def _serve_case(control: socket.socket, request: dict, channel_fd: int, output_fd: int) -> None:
    """Fork a worker, report its pid, wait for it, end what it left behind, report how it ended."""
    worker = os.fork()
    if worker == 0:
        control.close()
        isolate_worker.run(bytes.fromhex(request["token"]), channel_fd, output_fd)
    os.close(channel_fd)
    os.close(output_fd)
    _say(control, {"pid": worker})
    _wait(control, worker)
    _, status, usage = os.wait4(worker, 0)
    left_behind = _end_children()
    _say(control, {"exit": os.waitstatus_to_exitcode(status), "peak_rss_bytes": usage.ru_maxrss * 1024, "left_behind": left_behind})


def _wait(control: socket.socket, worker: int) -> None:
    """Wait until the worker has ended. The lab may ask for its end meanwhile; if the lab is gone, everything ends."""
    try:
        waiting_for, timeout_s = [os.pidfd_open(worker)], None
    except OSError:  # gVisor has none
        waiting_for, timeout_s = [], _POLL_S
    try:
        while not _has_ended(worker):
            if control in select.select([control, *waiting_for], [], [], timeout_s)[0]:
                asked = control.recv(1 << 16)
                os.kill(worker, signal.SIGKILL)  # unreaped, so the pid is still the worker's
                if not asked:
                    os.waitpid(worker, 0)
                    _end_children()
                    sys.exit(0)
    finally:
        for descriptor in waiting_for:
            os.close(descriptor)


def _has_ended(worker: int) -> bool:
    return os.waitid(os.P_PID, worker, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end_children() -> int:
    """Kill and reap all children, adopted ones included, until none is left; how many were still alive."""
    ended = 0
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:  # those that had ended by themselves
            pass
    while children := isolate_proc.children(os.getpid()):
        for pid in children:
            os.kill(pid, signal.SIGKILL)  # unreaped, so the pid is still that child's
        for pid in children:
            os.waitpid(pid, 0)
            ended += 1
    return ended
