"""Calls that misbehave in every way a kernel can; run in isolated workers by test_isolate.py. Imports no pytest."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from nvfp4lab.kernels import isolate_worker


class BackendSupportedError(Exception):
    """Named as FlashInfer's refusal."""


class Uncopyable:
    """Pickles, but refuses to be unpickled anywhere."""

    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise RuntimeError("not here")


def loaded(modules):
    return [module for module in modules if module in sys.modules]


def add(a, b):
    return a + b


def pid():
    return os.getpid()


def segfault():
    ctypes.string_at(0)


def abort():
    print("about to abort", flush=True)
    os.abort()


def exit_silently(code):
    os._exit(code)


def hang():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(1)


def eat_memory():
    hoard = []
    while True:
        hoard.append(b"x" * (16 << 20))


def chatter(lines):
    for number in range(lines):
        print(f"line {number}")
    os.write(2, b"raw bytes \xff on stderr\n")
    return lines


def babble():
    while True:
        os.write(1, b"!" * (1 << 20))


def fail(message):
    raise ValueError(message)


def refuse():
    raise BackendSupportedError("mm_fp4 does not support backend 'cutlass' with capability 90")


def run_out():
    raise MemoryError("no room for the workspace")


def leave():
    sys.exit(0)


def report_then_die():
    isolate_worker._report("returned", (b"", 0.0))
    os.kill(os.getpid(), signal.SIGSEGV)


def report_twice():
    isolate_worker._report("returned", (b"N.", 0.0))
    return 1


def report_then_hang():
    isolate_worker._report("returned", (b"N.", 0.0))
    time.sleep(600)


def return_uncopyable():
    return Uncopyable()


def return_local_function():
    return lambda: None


def forge():
    """Write to every open descriptor what looks like a result, then vanish."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"returned ok " * 10)
        except OSError:
            continue
    os._exit(0)


def leave_grandchild(marker):
    """A daemon: double fork and an own session, so neither parenthood nor the process group leads to it."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            Path(marker).write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)
    while not (Path(marker).exists() and Path(marker).read_text()):
        time.sleep(0.01)
    return "done"


def kill_server(marker=os.devnull):
    Path(marker).write_text(str(os.getpid()))
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def raise_signal(number):
    os.kill(os.getpid(), number)
    time.sleep(600)


def compile_for(seconds, compiler):
    """Stand-in for a JIT build: a child process of a compiler's name."""
    subprocess.run([compiler, str(seconds)], check=True)
    return "built"


def compile_inside(seconds):
    with isolate_worker.compiling():
        time.sleep(seconds)
    return "built"


def environment(name):
    return os.environ.get(name)


def loaded_modules():
    return sorted(sys.modules)


def cuda_touched():
    import torch

    return torch.cuda.is_initialized()
