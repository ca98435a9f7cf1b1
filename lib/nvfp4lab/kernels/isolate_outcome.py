"""What an isolated case may use, what was seen of it, and the verdict that follows."""

import dataclasses
import pickle
import re
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nvfp4lab.kernels import isolate_proc, isolate_wire
from nvfp4lab.records import Verdict

_TAIL_BYTES = 4000
# With these, kernels and their Python front ends refuse by themselves. Class names: the packages need not be imported here.
_REFUSALS = frozenset({"BackendSupportedError", "NotImplementedError"})
_SOURCE_PATH = re.compile(r"(?<![\w.:/])/(?:[^\s/:'\"()]+/)+([\w.+-]+\.(?:cuh?|inl|hpp|cpp|cc|c|h|py))\b")
_OUT_OF_MEMORY = frozenset({"MemoryError", "OutOfMemoryError"})


@dataclasses.dataclass(frozen=True)
class Limits:
    """When to end a case.

    timeout_s: wall time without compiling; compile_timeout_s: compiling alone; exit_s: from the result to the process's end.
    memory_bytes: resident bytes of the worker and its descendants; None: no limit. output_bytes: size of its output file.
    """

    timeout_s: float = 120.0
    compile_timeout_s: float = 1800.0
    exit_s: float = 5.0
    memory_bytes: int | None = None
    output_bytes: int = 64 << 20


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of one isolated call.

    value: what the call returned, if and only if the verdict is OK.
    signal: name such as "SIGSEGV" if one ended the worker; exit_code: negative for a signal, None if unknown.
    error_types: class names of what the call raised, most derived first.
    output_tail: end of what it wrote to stdout and stderr; all of it is in output_path, None if it wrote nothing.
    wall_s: from fork to end; run_s: the call alone; compile_s: part of it spent compiling (seen every 50 ms).
    left_behind: processes that outlived the worker and were killed. xids: GPU errors the driver logged meanwhile.
    device_ok: whether a fresh context computed afterwards; None if not asked (no GPU, or the case's own context did).
    """

    verdict: Verdict
    reason: str = ""
    value: Any = None
    exit_code: int | None = None
    signal: str | None = None
    error_types: tuple[str, ...] = ()
    output_tail: str = ""
    output_path: Path | None = None
    wall_s: float = 0.0
    run_s: float | None = None
    compile_s: float = 0.0
    peak_rss_bytes: int | None = None
    left_behind: int = 0
    xids: tuple[str, ...] = ()
    device_ok: bool | None = None


@dataclasses.dataclass
class Running:
    """A case in flight: what has been seen of it so far. Times are of time.monotonic().

    pid: None until the server has told. reports: what the harness in the worker said; a sound case says one thing.
    ended: the server's last word on the worker. killed_for: verdict and reason if a limit was exceeded.
    """

    pid: int | None
    frames: isolate_wire.Frames
    output_path: Path
    oom_kills: int
    started: float
    ticked: float
    compile_s: float = 0.0
    says_compiling: bool = False
    reports: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    reported_at: float | None = None
    ended: Mapping[str, Any] | None = None
    server_died: bool = False
    kill_sent_at: float | None = None
    killed_for: tuple[Verdict, str] | None = None

    def take(self, data: bytes) -> None:
        """Note what the worker sent."""
        for kind, payload in self.frames.feed(data):
            if kind == "compiling":
                self.says_compiling = payload
            else:
                self.reports.append((kind, payload))
                self.reported_at = self.reported_at or time.monotonic()

    def tick(self) -> None:
        """Add the time since the last tick to the compile time if something compiles now."""
        now = time.monotonic()
        if self.says_compiling or (self.pid and isolate_proc.is_compiling(self.pid)):
            self.compile_s += now - self.ticked
        self.ticked = now

    def over(self, limits: Limits) -> tuple[Verdict, str] | None:
        """The first limit that is exceeded."""
        now = time.monotonic()
        running_s = now - self.started - self.compile_s
        if self.reported_at and now - self.reported_at > limits.exit_s:
            return Verdict.HANG, f"reported a result, then did not end within {limits.exit_s:g} s"
        if running_s > limits.timeout_s:
            compiled = f" (and {self.compile_s:.0f} s compiling)" if self.compile_s else ""
            return Verdict.HANG, f"no answer within {limits.timeout_s:g} s{compiled}"
        if self.compile_s > limits.compile_timeout_s:
            return Verdict.HANG, f"still compiling after {limits.compile_timeout_s:g} s"
        if limits.memory_bytes and self.pid and isolate_proc.rss_bytes(self.pid) > limits.memory_bytes:
            return Verdict.OOM, f"used more than its {limits.memory_bytes / 2**20:.0f} MiB of memory"
        if self.output_path.exists() and self.output_path.stat().st_size > limits.output_bytes:  # a case may delete anything
            return Verdict.CRASH, f"wrote more than {limits.output_bytes / 2**20:g} MiB of output"
        return None


def without_folders(text: str) -> str:
    """Paths of source files as the files' names: in which folder a kernel was built says nothing about it."""
    return _SOURCE_PATH.sub(r"\1", text)


def judge(running: Running, expect: type) -> Outcome:
    """The Outcome of a case that has ended (or will never end). `expect`: type that its value must have."""
    verdict, reason, value = _verdict(running, expect)
    ended = running.ended or {}
    exit_code = ended.get("exit")
    kind, payload = running.reports[0] if running.reports else ("", None)
    output = running.output_path.read_bytes() if running.output_path.exists() else b""
    if not output:
        running.output_path.unlink(missing_ok=True)
    return Outcome(
        verdict,
        reason,
        value,
        exit_code=exit_code,
        signal=_signal_name(exit_code),
        error_types=tuple(payload["types"]) if kind == "raised" else (),
        output_tail=output[-_TAIL_BYTES:].decode(errors="replace"),
        output_path=running.output_path if output else None,
        wall_s=time.monotonic() - running.started,
        run_s=payload[1] if kind == "returned" else payload["run_s"] if kind == "raised" else None,
        compile_s=running.compile_s,
        peak_rss_bytes=ended.get("peak_rss_bytes"),
        left_behind=ended.get("left_behind", 0),
    )


def _verdict(running: Running, expect: type) -> tuple[Verdict, str, Any]:
    if running.ended is None:
        if running.killed_for:
            return Verdict.HANG, f"{running.killed_for[1]}; then it did not die of SIGKILL", None
        if isolate_proc.oom_kills() > running.oom_kills:
            return Verdict.OOM, "the system ran out of memory and killed it or the fork server", None
        return Verdict.CRASH, "took the fork server down with it", None
    if running.killed_for:
        return *running.killed_for, None
    exit_code = running.ended["exit"]
    if exit_code != 0:
        return *_died(exit_code, running), None
    if len(running.reports) != 1:
        return Verdict.CRASH, f"ended with exit code 0 and {len(running.reports)} results instead of one", None
    kind, payload = running.reports[0]
    if kind == "returned":
        return _returned(payload, expect)
    if kind == "raised":
        return *_raised(payload), None
    return Verdict.CRASH, f"its report cannot be used: {payload if kind == 'damaged' else kind}", None


def _died(exit_code: int, running: Running) -> tuple[Verdict, str]:
    after = " after it had reported a result" if running.reports else ""
    if exit_code == -signal.SIGKILL and isolate_proc.oom_kills() > running.oom_kills:
        return Verdict.OOM, f"the system ran out of memory and killed it{after}"
    how = f"killed by {_signal_name(exit_code)}" if exit_code < 0 else f"exit code {exit_code}"
    return Verdict.CRASH, f"{how}{after}"


def _raised(payload: Mapping[str, Any]) -> tuple[Verdict, str]:
    types, message = payload["types"], without_folders(" ".join(payload["message"].split()))
    reason = f"{types[0]}: {message}" if message else types[0]
    if payload["phase"] != "the call":
        return Verdict.CRASH, f"{payload['phase']}: {reason}"
    if _OUT_OF_MEMORY & set(types):
        return Verdict.OOM, reason
    return (Verdict.UNSUPPORTED if _REFUSALS & set(types) else Verdict.CRASH), reason


def _returned(payload: tuple[bytes, float], expect: type) -> tuple[Verdict, str, Any]:
    try:
        value = pickle.loads(payload[0])
    except Exception as error:  # unpickling runs the payload's own code
        return Verdict.CRASH, f"its result does not unpickle here: {type(error).__name__}: {error}", None
    if not isinstance(value, expect):
        return Verdict.CRASH, f"returned {type(value).__name__} where {expect.__name__} was promised", None
    return Verdict.OK, "", value


def _signal_name(exit_code: int | None) -> str | None:
    if exit_code is None or exit_code >= 0:
        return None
    try:
        return signal.Signals(-exit_code).name
    except ValueError:  # a real-time signal
        return f"signal {-exit_code}"
