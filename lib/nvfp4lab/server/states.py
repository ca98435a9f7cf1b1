"""What a starting server is doing, and whether it still gets anywhere.

A first start may take seconds or half an hour (one Marlin build ran over five minutes with nothing in the log), so no
fixed time limit can tell a hang. What is limited is the time without progress: no new log line, no compiler at work, no
change in GPU memory, no CPU time. CPU time alone is weaker, for a deadlocked collective spins: it has its own limit.
"""

import dataclasses
import enum
import re
from collections.abc import Iterable
from pathlib import Path


class State(enum.StrEnum):
    """Where a server is between start and end."""

    IMPORTING = "importing"
    LOADING = "loading"
    COMPILING = "compiling"
    CAPTURING = "capturing"
    WARMING = "warming"
    READY = "ready"
    FAILED = "failed"
    HUNG = "hung"
    STOPPED = "stopped"


# Kernel names of processes that exist only while a kernel is being built.
COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "ninja", "cudafe++", "fatbinary", "nvlink", "cc1plus"})

# What SGLang 0.5.9 to 0.5.23 logs when it enters a phase; the last match in the log holds.
LOG_SIGNS: tuple[tuple[State, re.Pattern[str]], ...] = (
    (State.LOADING, re.compile(r"Load weight begin|Init torch distributed begin|Init parallel begin")),
    (State.CAPTURING, re.compile(r"Capture \w+ ?graph begin|Capture .*CUDA graph begin|Capturing batches", re.IGNORECASE)),
    (State.WARMING, re.compile(r"Application startup complete|Uvicorn running on|fired up and ready")),
)
# Written because we ask; counting these as progress would keep a dead server alive for ever.
OWN_ECHO = re.compile(r'"GET /(health|server_info|model_info)\S* HTTP')

WORKING_CORES = 0.1  # below this a process tree only waits: pollers and timers of an idle server use 0.01 to 0.05


class LogWatch:
    """Reads a growing log: which phase it shows, and how many lines a server wrote on its own account."""

    def __init__(self, path: Path):
        self.path = path
        self.phase = State.IMPORTING
        self.lines = 0
        self._offset = 0
        self._rest = b""

    def read(self) -> None:
        """Take in what was written since the last call. A progress bar (carriage returns) counts as lines."""
        with self.path.open("rb") as log:
            log.seek(self._offset)
            fresh = log.read()
        self._offset += len(fresh)
        *whole, self._rest = re.split(rb"[\r\n]+", self._rest + fresh)
        self._take(line.decode(errors="replace") for line in whole)

    def _take(self, lines: Iterable[str]) -> None:
        for line in lines:
            if not OWN_ECHO.search(line):
                self.lines += 1
                self.phase = next((state for state, sign in LOG_SIGNS if sign.search(line)), self.phase)


@dataclasses.dataclass(frozen=True)
class Sample:
    """One look at a starting server. cpu_s: of the whole tree so far; time_s: any monotonic clock."""

    time_s: float
    log_lines: int
    cpu_s: float
    gpu_mib: float
    compiling: bool


class ProgressClock:
    """Seconds without any progress, and seconds with none but CPU time; both fall to 0 when something happens."""

    def __init__(self, first: Sample):
        self._before = first
        self._last_any_s = self._last_sure_s = first.time_s

    def tick(self, now: Sample) -> None:
        """Take in the next sample; samples come in order of time."""
        before, self._before = self._before, now
        works = now.cpu_s - before.cpu_s > WORKING_CORES * (now.time_s - before.time_s)
        sure = now.log_lines > before.log_lines or abs(now.gpu_mib - before.gpu_mib) >= 1.0 or (now.compiling and works)
        if sure:
            self._last_sure_s = now.time_s
        if sure or works:
            self._last_any_s = now.time_s

    @property
    def idle_s(self) -> float:
        return self._before.time_s - self._last_any_s

    @property
    def spinning_s(self) -> float:
        return self._before.time_s - self._last_sure_s
