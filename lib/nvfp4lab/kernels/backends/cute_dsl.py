"""CuTe-DSL compiles inside the process, where no compiler is seen among a worker's descendants: so it says itself when it does."""

import functools
import importlib

from nvfp4lab.kernels import isolate_worker

WRITTEN_IN_IT = frozenset({"cute-dsl", "b12x", "auto"})  # values of FlashInfer's `backend`; what auto picks may be


def mark_compiles(kernel: str = "cute-dsl") -> None:
    """From now on in this process, calls of `cutlass.cute.compile` count as compiling, if this kernel may be written in it.

    Read in nvidia-cutlass-dsl 4.4.2 and 4.5.0: `compile` is a `CompileCallable`, and so is `compile[options]`.
    """
    if kernel in WRITTEN_IN_IT:
        _mark()


@functools.lru_cache(maxsize=1)
def _mark() -> None:
    try:
        cute = importlib.import_module("cutlass.cute")
    except Exception:  # absent, or broken in whatever way: a kernel that needs it says so itself
        return
    kind = type(cute.compile)
    original = kind.__call__

    @functools.wraps(original)
    def marked(self, *args, **kwargs):
        with isolate_worker.compiling():
            return original(self, *args, **kwargs)

    kind.__call__ = marked
