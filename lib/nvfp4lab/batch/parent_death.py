"""A child that does not outlive its parent: prctl(2), PR_SET_PDEATHSIG."""

import ctypes
import signal

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded now: little is allowed between fork and exec


def die_with_parent() -> None:
    """In the child: be killed when the thread that started this process ends, in whatever way."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
