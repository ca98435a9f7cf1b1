"""What a worker runs in test_sweep.py: the case's seed says how it ends. Imports no pytest."""

import os
import signal
import time
from pathlib import Path

from nvfp4lab.kernels.cases import Case, CaseResult
from nvfp4lab.records import Number, Verdict, WrongKind

DEATHS = ("segfault", "abort", "exit", "raise", "lie", "server")


def end_as_told(case: Case) -> CaseResult:
    """Die as `case.probe` says; otherwise answer with the case's own seed."""
    print(f"seed {case.seed}", flush=True)
    match case.probe:
        case "segfault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "abort":
            os.abort()
        case "exit":
            os._exit(case.seed % 100)
        case "raise":
            raise ValueError(f"seed {case.seed}")
        case "lie":
            return f"all is well with seed {case.seed}"
        case "server":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)
        case "slow":
            Path(case.source).write_text(str(os.getpid()))
            time.sleep(60)
        case "wrong":
            return CaseResult(Verdict.WRONG, "three rows are NaN", WrongKind.NAN, details={"first_bad_row": 3})
    return CaseResult(Verdict.OK, numbers=(Number("seed", case.seed, ""),))


def time_as_told(case: Case) -> CaseResult:
    """A timed case: 2 ms for work that takes a CPU's peak well below that."""
    numbers = Number("median_ms", 2.0, "ms", 1.0, 4.0, 9), Number("flops", 1e3, "FLOP"), Number("min_bytes", 1e3, "B")
    return CaseResult(Verdict.OK, numbers=numbers, details={"arithmetic": "fp32"})
