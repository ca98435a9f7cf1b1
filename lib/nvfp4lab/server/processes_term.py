"""SIGTERM to the lab ends its servers before it ends the lab.

By default Python dies of SIGTERM on the spot: no `finally`, no `atexit`, and the servers stay. A job scheduler, `docker
stop` and Jupyter all send it. While a server is open the signal therefore stops every open server and then raises
SystemExit(143). A program that has its own handler, or ignores the signal, keeps its way.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Protocol

EXIT_CODE = 128 + signal.SIGTERM


class Stoppable(Protocol):
    def stop(self) -> object: ...


class _Watch:
    """The open servers of this process and what the signal meant before the first of them."""

    def __init__(self):
        self._open: list[Stoppable] = []
        self._pid = os.getpid()
        self._deferring = self._came = False

    def add(self, server: Stoppable) -> None:
        self._open.append(server)
        if _on_main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._pid = os.getpid()
            signal.signal(signal.SIGTERM, self._handle)

    def remove(self, server: Stoppable) -> None:
        self._open = [other for other in self._open if other is not server]
        if not self._open and _on_main_thread() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """The signal waits for the end of the block: a process that exists, but whose pid nobody has yet, cannot be stopped."""
        self._deferring = _on_main_thread()
        try:
            yield
        finally:
            if _on_main_thread():
                self._deferring = False
                if self._came:
                    self._handle()

    def _handle(self, *_) -> None:
        if os.getpid() != self._pid:  # a fork of the lab: these are not its servers
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._came = self._deferring
        if self._deferring:
            return
        for server in list(self._open):
            server.stop()  # here and not only by unwinding: IPython catches SystemExit and would keep a server of another cell
        raise SystemExit(EXIT_CODE)


def _on_main_thread() -> bool:
    """Python lets only the main thread set handlers, and runs them there."""
    return threading.current_thread() is threading.main_thread()


_WATCH = _Watch()
add, remove, deferred = _WATCH.add, _WATCH.remove, _WATCH.deferred
