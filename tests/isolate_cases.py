"""Calls that misbehave in every way a kernel can; run in isolated workers by test_isolate.py. Imports no pytest."""

import ctypes
import os
import signal
import subprocess
import sys
import time
import types
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


def delete_own_output():
    """Whatever file this process writes to is gone, while it goes on for longer than the lab's next look."""
    Path("/proc/self/fd/1").readlink().unlink()
    time.sleep(0.3)
    return "done"


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


def compile_in_cute_dsl(seconds):
    """What FlashInfer does: `cute.compile(...)` and `cute.compile[options](...)`, here of a package that only sleeps."""
    from nvfp4lab.kernels.backends import cute_dsl  # it imports torch, which some workers must not have

    package, cute = types.ModuleType("cutlass"), types.ModuleType("cutlass.cute")

    class CompileCallable:
        def __getitem__(self, options):
            return CompileCallable()

        def __call__(self, kernel):
            time.sleep(seconds / 2)
            return f"{kernel} built"

    package.cute, cute.compile = cute, CompileCallable()
    sys.modules |= {"cutlass": package, "cutlass.cute": cute}
    cute_dsl.mark_compiles("cudnn")
    assert not hasattr(CompileCallable.__call__, "__wrapped__"), "only for kernels written in it"
    for _ in range(2):
        cute_dsl.mark_compiles("b12x")
    return cute.compile("one"), cute.compile["options"]("two")


def environment(name):
    return os.environ.get(name)


def loaded_modules():
    return sorted(sys.modules)


def cuda_touched():
    import torch

    return torch.cuda.is_initialized()
