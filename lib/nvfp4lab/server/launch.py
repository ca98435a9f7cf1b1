"""Starts one server, says what it is doing until it answers, and leaves nothing of it behind.

    with Server("bf16", command, env, run_dir) as server:
        requests.post(server.url + "/generate", ...)

Readiness counts only from a process that we started: a foreign server on the same port is an error, not a success.
Whatever happens in the block (an exception, Ctrl-C, SIGTERM, the server's own death), afterwards its processes, its ports
and the memory of the GPUs that it may use are back; `server.ending` says so in numbers.
"""

import atexit
import contextlib
import dataclasses
import os
import random
import re
import shlex
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import requests

from nvfp4lab.errors import LabError
from nvfp4lab.server import processes, processes_gpu, processes_table, processes_term
from nvfp4lab.server.processes import Started
from nvfp4lab.server.states import COMPILERS, LogWatch, ProgressClock, Sample, State

DYING_S = 1.0
FIRST_PORT = 10_000
EPHEMERAL_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_HANDED_OUT: set[int] = set()
GPU_SLACK_MIB = 16.0  # the driver's own bookkeeping moves by a few MiB when contexts come and go


@dataclasses.dataclass(frozen=True)
class Limits:
    """How long to wait, in seconds. idle_s: without any progress; spinning_s: with none but CPU time."""

    idle_s: float = 180.0
    spinning_s: float = 1800.0
    term_s: float = 15.0
    kill_s: float = 10.0
    release_s: float = 30.0
    poll_s: float = 0.25
    health_s: float = 15.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a start went.

    state: READY, FAILED or HUNG. reason: one sentence, empty when ready. exit_code: of the first process, negative for
    a signal, None while it runs. timeline: (state, seconds after the start at which it began), in order.
    """

    name: str
    state: State
    reason: str
    exit_code: int | None
    seconds: float
    timeline: tuple[tuple[State, float], ...]
    log: Path
    command: str


@dataclasses.dataclass(frozen=True)
class Ending:
    """What was left after the end; all empty or 0 when it was clean. killed: TERM was not enough."""

    left_pids: tuple[int, ...]
    left_ports: tuple[int, ...]
    left_gpu_mib: float
    seconds: float
    killed: bool

    @property
    def clean(self) -> bool:
        return not self.left_pids and not self.left_ports and self.left_gpu_mib <= GPU_SLACK_MIB


class StartFailed(LabError):
    """The server did not become ready; `outcome` says how far it came. It is already gone when this is raised."""

    def __init__(self, outcome: Outcome):
        super().__init__(f"{outcome.name}: {outcome.reason}; log: {outcome.log}")
        self.outcome = outcome


class Server:
    """One server process tree as a context manager.

    command: the command line for a port, for example `lambda port: ["python", "-m", "http.server", str(port)]`.
    env: the whole environment. run_dir: gets `logs/NAME.log` and a line in `servers.jsonl`.
    """

    def __init__(
        self,
        name: str,
        command: Callable[[int], Sequence[str]],
        env: Mapping[str, str],
        run_dir: Path | str,
        limits: Limits = Limits(),
        on_state: Callable[[State, float], None] = lambda state, seconds: None,
        health: str = "/health",
    ):
        self.name, self.limits, self.run_dir = name, limits, Path(run_dir)
        self.port = fresh_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.outcome: Outcome | None = None
        self.ending: Ending | None = None
        self.has_neighbours = False  # servers that share our GPUs: then memory in use there says nothing about us
        self._cancelled, self._stopping = threading.Event(), threading.RLock()  # re-entrant: a signal may come while we stop
        self._command, self.env, self._health, self._on_state = list(command(self.port)), dict(env), health, on_state
        self._log = _fresh_log(self.run_dir / "logs", name)
        self._started: Started | None = None
        self._guard: subprocess.Popen | None = None
        self._timeline: list[tuple[State, float]] = []
        self._held: set[int] = set()  # ports seen in the hands of our family

    def __enter__(self) -> "Server":
        return self.start()

    def __exit__(self, *exception) -> None:
        self.stop()

    def start(self) -> "Server":
        """Start and wait until ready. Raises StartFailed (after cleaning up), OSError when the log cannot be written."""
        os.environ.update(past_proxies(os.environ))
        atexit.register(self.stop)
        processes_term.add(self)
        self._gpu_before = processes_gpu.used_mib(self.env)
        self._began_s = time.monotonic()
        try:
            with processes_term.deferred():
                self._started, self._guard = processes.start(self._command, self.env, self.name, self.port, self._log, self.run_dir)
            self.outcome = self._wait()
        finally:  # not only on Exception: Ctrl-C must leave nothing either
            if self.outcome is None or self.outcome.state is not State.READY:
                self.stop()
        if self.outcome.state is not State.READY:
            raise StartFailed(self.outcome)
        return self

    def lost(self) -> str | None:
        """Why a server that was ready no longer is; None while it lives and listens."""
        if self._started.exit_code() is None and self.port in processes_table.listeners(self._started.family()):
            return None
        # A dying process lets go of its files first, and may then take seconds to leave a GPU's driver; gone, it is soon on record.
        began_s, limit_s, first, is_ending = time.monotonic(), DYING_S, self._started.first(), False
        while (code := self._started.exit_code()) is None and time.monotonic() - began_s < limit_s:
            time.sleep(0.02)
            is_ending = first is not None and not (first.alive() and processes_table.has_files(first))
            limit_s = max(DYING_S, self.limits.kill_s) if is_ending else DYING_S
        if code is not None:
            return f"the server ended, {_exit_words(code)}"
        if not is_ending:
            return f"the server runs, but no longer listens on port {self.port}"
        if not first.alive():
            return "the server ended, and nobody was there to take its exit code"
        return f"the server began to end by itself and is not gone after {time.monotonic() - began_s:.0f} s"

    def stop(self) -> Ending:
        """End the whole family and wait until ports and GPU memory are back. May be called again, and from any thread."""
        self._cancelled.set()
        with self._stopping:
            return self._stop()

    def _stop(self) -> Ending:
        if self.ending is not None or self._started is None:
            self._forget()
            return self.ending or Ending((), (), 0.0, 0.0, False)
        began_s = time.monotonic()
        ports = self._held | processes_table.listeners(self._started.family(thorough=True))
        ended = processes.end(self._started, self.limits.term_s, self.limits.kill_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._guard.wait(timeout=0.1 if ended.left else 5)  # collects the zombie
        left_ports = self._wait_for_release(ports)
        left_pids = tuple(sorted(process.pid for process in ended.left))
        self.ending = Ending(left_pids, left_ports, self._gpu_left_mib(), time.monotonic() - began_s, ended.killed)
        self._enter(State.STOPPED)
        self._forget()
        return self.ending

    def _forget(self) -> None:
        atexit.unregister(self.stop)
        processes_term.remove(self)

    def log_text(self) -> str:
        """All that the server wrote so far."""
        return self._log.read_text(encoding="utf-8", errors="replace") if self._log.exists() else ""

    def _wait(self) -> Outcome:
        log, clock = LogWatch(self._log), None
        while True:
            family = self._started.family()
            compiling = not COMPILERS.isdisjoint(processes_table.names(family))
            log.read()
            gpu_mib = 0.0 if self.has_neighbours else sum(processes_gpu.used_mib(self.env))
            if self._cancelled.is_set():  # from another thread
                return self._outcome(State.FAILED, "stopped by the lab before it was ready")
            sample = Sample(time.monotonic(), log.lines, processes_table.cpu_seconds(family), gpu_mib, compiling)
            clock = clock or ProgressClock(sample)
            clock.tick(sample)
            self._enter(State.COMPILING if compiling else log.phase)
            if ended := self._verdict(clock):
                self._enter(ended[0])
                return self._outcome(*ended)
            time.sleep(self.limits.poll_s)

    def _verdict(self, clock: ProgressClock) -> tuple[State, str] | None:
        """(final state, reason), or None while the start goes on."""
        code = self._started.exit_code()
        if code is not None:
            return State.FAILED, f"the server ended before it was ready, {_exit_words(code)}"
        if processes_table.is_listened_to(self.port):
            # Taken anew: whoever listens may have been forked since `family` was.
            self._held |= processes_table.listeners(self._started.family())
            # Looked at once more: ours may have closed it in between, which is no foreign server.
            if self.port not in self._held and processes_table.is_listened_to(self.port):
                return State.FAILED, f"port {self.port} is in use by another process; start again to get a fresh port"
            if self.port in self._held and self._healthy():
                return State.READY, ""
        doing = self._timeline[-1][0]
        if clock.idle_s > self.limits.idle_s:
            return State.HUNG, f"no log line, CPU time or compiler for {clock.idle_s:.0f} s while {doing}"
        if clock.spinning_s > self.limits.spinning_s:
            return State.HUNG, f"nothing but CPU time for {clock.spinning_s:.0f} s while {doing}"
        return None

    def _healthy(self) -> bool:
        try:
            return requests.get(self.url + self._health, timeout=self.limits.health_s).status_code == 200
        except requests.RequestException:
            return False

    def _enter(self, state: State) -> None:
        if not self._timeline or self._timeline[-1][0] is not state:
            seconds = time.monotonic() - self._began_s
            self._timeline.append((state, seconds))
            self._on_state(state, seconds)

    def _outcome(self, state: State, reason: str) -> Outcome:
        return Outcome(
            self.name,
            state,
            reason,
            self._started.exit_code(),
            time.monotonic() - self._began_s,
            tuple(self._timeline),
            self._log,
            shlex.join(self._command),
        )

    def _gpu_left_mib(self) -> float:
        return 0.0 if self.has_neighbours else processes_gpu.above(self._gpu_before, self.env)

    def _wait_for_release(self, ports: set[int]) -> tuple[int, ...]:
        """Wait for ports and GPU memory; the ports that are still listened on."""
        wait_until(lambda: not _listened(ports) and self._gpu_left_mib() <= GPU_SLACK_MIB, self.limits.release_s)
        return tuple(sorted(_listened(ports)))


def past_proxies(env: Mapping[str, str]) -> dict[str, str]:
    """What to add to `env` so that requests to our own servers do not go to the proxy that it names for the world."""
    ours = "127.0.0.1"
    return {
        name: f"{env[name]},{ours}" if env.get(name) else ours for name in ("no_proxy", "NO_PROXY") if ours not in env.get(name, "")
    }


def fresh_port() -> int:
    """A TCP port that is free on 127.0.0.1 now and that this process has not handed out before.

    From below the ephemeral range: a server listens on it only after a minute of imports, and by then the kernel may have
    given an ephemeral one to any outgoing connection. Readiness is checked by owner, so losing the race is noticed.
    """
    lowest_ephemeral = int(EPHEMERAL_PORTS.read_text().split()[0]) if EPHEMERAL_PORTS.exists() else 32768
    for port in random.SystemRandom().sample(range(FIRST_PORT, max(lowest_ephemeral, FIRST_PORT + 10_000)), 1000):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in _HANDED_OUT:
                _HANDED_OUT.add(port)
                return port
    raise LabError(f"of 1,000 ports between {FIRST_PORT} and {lowest_ephemeral} none is free", exit_code=3)


def wait_until(over: Callable[[], bool], limit_s: float) -> None:
    """Return when `over()` is true or after `limit_s` seconds; it is asked at least once."""
    deadline = time.monotonic() + limit_s
    while not over() and time.monotonic() < deadline:
        time.sleep(0.05)


def _fresh_log(folder: Path, name: str) -> Path:
    """`folder/NAME.log`, or with -2, -3, ... when earlier starts left theirs: a log is evidence and is not overwritten."""
    ours = re.compile(rf"{re.escape(name)}(-\d+)?\.log")
    count = 1 + sum(ours.fullmatch(path.name) is not None for path in folder.glob("*.log"))
    return folder / (f"{name}.log" if count == 1 else f"{name}-{count}.log")


def _listened(ports: set[int]) -> set[int]:
    return {port for port in ports if processes_table.is_listened_to(port)}


def _exit_words(code: int) -> str:
    """SGLang kills its own process tree when a rank fails, so a signal is most often the server's own."""
    return f"killed by signal {-code}, which the lab did not send" if code < 0 else f"exit code {code}"
