"""Starts the processes of one server, knows them all, and ends exactly those.

A server is started through `processes_guard`, which stays the ancestor of all it starts. Should the guard be killed,
the environment variable MARKER, unique to the start, still names what it started. Nothing else is ever signalled: a
process counts as ours only by descent or by marker, and is signalled through a pidfd, so that a recycled pid cannot be
hit. `servers.jsonl` in the run folder records each start; `leftovers` reads it.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvfp4lab.report.redact import redact
from nvfp4lab.server import processes_guard, processes_table
from nvfp4lab.server.processes_table import ProcessId

MARKER = "NVFP4LAB_SERVER"
RECORDS = "servers.jsonl"
LEAVE_S = 2.0


@dataclasses.dataclass(frozen=True)
class Started:
    """One start of a server; `guard` is None when the lab was killed before the guard could say who it is."""

    name: str
    marker: str
    port: int
    guard: ProcessId | None
    run_dir: Path

    def family(self, thorough: bool = False) -> set[ProcessId]:
        """All live processes that this start brought about, without the guard.

        By descent from the guard; by marker too if `thorough` or without a guard, which reads every environment.
        """
        rows = processes_table.table()
        guarded = processes_table.descendants({self.guard} - {None}, rows)
        if thorough or not guarded:
            guarded |= processes_table.descendants(processes_table.marked(f"{MARKER}={self.marker}", rows), rows)
        return guarded - {self.guard}

    def exit_code(self) -> int | None:
        """Exit code of the server's first process (negative: the signal that ended it); None while it runs."""
        row = self._recorded("exited")
        return row["exit_code"] if row else None

    def first(self) -> ProcessId | None:
        """The server's first process; None before it exists."""
        row = self._recorded("started")
        return ProcessId(row["pid"], row["start_ticks"]) if row else None

    def _recorded(self, event: str) -> dict | None:
        return next((row for row in _rows(self.run_dir) if row["marker"] == self.marker and row["event"] == event), None)


def start(
    command: Sequence[str], env: Mapping[str, str], name: str, port: int, log: Path, run_dir: Path
) -> tuple[Started, subprocess.Popen]:
    """Start `command` under a guard, its output in `log`; the start is on record before the first process exists.

    Returns the record and the guard's Popen, for the caller to wait for after `end`. Raises OSError when log or record
    cannot be written. A command that cannot be executed shows as exit code 127 and a line in the log.
    """
    marker = secrets.token_hex(8)
    run_dir.mkdir(parents=True, exist_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    _record(run_dir, event="launching", marker=marker, name=name, port=port, boot=_boot(), lab=os.getpid())
    _record(run_dir, event="command", marker=marker, command=redact(shlex.join(command)))
    # SPT_NOENV: SGLang renames its processes by setproctitle, which would else overwrite the environment with the marker.
    marked = {**env, MARKER: marker, "SPT_NOENV": "1"}
    with log.open("ab") as output:
        guard = subprocess.Popen(
            [sys.executable, "-I", "-S", processes_guard.__file__, str((run_dir / RECORDS).resolve()), marker, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=marked,
            start_new_session=True,
        )
    return Started(name, marker, port, ProcessId.of(guard.pid), run_dir), guard


@dataclasses.dataclass(frozen=True)
class Ended:
    """left: what could not be ended, normally nothing. killed: TERM was not enough for all of the family."""

    left: frozenset[ProcessId]
    killed: bool


def end(started: Started, term_wait_s: float = 10.0, kill_wait_s: float = 10.0) -> Ended:
    """TERM to the whole family, wait, KILL until nothing is left.

    The record is closed only when nothing is left: a family that cannot be ended stays visible to `leftovers`. The guard goes
    last and by itself: it stays while anything is below it, and one that stays means that somebody was overlooked.
    """
    stubborn = _signal_until_gone(started, signal.SIGTERM, term_wait_s)
    left = _signal_until_gone(started, signal.SIGKILL, kill_wait_s)
    while not left and started.guard is not None and not _leaves(started.guard) and started.family(thorough=True):
        left = _signal_until_gone(started, signal.SIGKILL, kill_wait_s)
    if not left:
        if started.guard is not None:
            started.guard.send(signal.SIGKILL)  # halted, or nobody's ancestor any more
        _record(started.run_dir, event="ended", marker=started.marker)
    return Ended(frozenset(left), killed=bool(stubborn))


def leftovers(run_dir: Path | str) -> list[Started]:
    """Starts on record in `run_dir` that were never ended and still have a live process. Reports; ends nothing.

    A server that died by itself after its lab was killed is no leftover; records of before the last boot are ignored.
    """
    run_dir = Path(run_dir)
    rows = _rows(run_dir)
    ended = {row["marker"] for row in rows if row["event"] == "ended"}
    guards = {row["marker"]: ProcessId(row["pid"], row["start_ticks"]) for row in rows if row["event"] == "guarded"}
    opened = [row for row in rows if row["event"] == "launching" and row["marker"] not in ended and row["boot"] == _boot()]
    starts = [Started(row["name"], row["marker"], row["port"], guards.get(row["marker"]), run_dir) for row in opened]
    return [started for started in starts if started.family(thorough=True)]


def _signal_until_gone(started: Started, number: signal.Signals, wait_s: float) -> set[ProcessId]:
    """Signal the family, and whoever joins it meanwhile, until it is gone or the time is over; who is left then."""
    deadline = time.monotonic() + wait_s
    told: set[ProcessId] = set()
    while family := started.family(thorough=True):
        for process in family - told:
            process.send(number)
        told |= family
        if time.monotonic() > deadline:
            return family
        time.sleep(0.02)
    return set()


def _leaves(guard: ProcessId) -> bool:
    """Whether the guard leaves, as it does once nothing is below it."""
    deadline = time.monotonic() + LEAVE_S
    while guard.alive() and time.monotonic() < deadline:
        time.sleep(0.005)
    return not guard.alive()


def _record(run_dir: Path, **values) -> None:
    processes_guard.record(str(run_dir / RECORDS), **values)


def _rows(run_dir: Path) -> list[dict]:
    """Whole lines of the record file; a torn line is skipped."""
    path = run_dir / RECORDS
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
