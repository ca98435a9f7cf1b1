"""What every stage writes: Target, Stack, Verdict, Evidence, and the append-only ledger.

Stages share nothing but these records. All are frozen, all survive a round trip through one JSON line.
"""

import dataclasses
import datetime
import enum
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from nvfp4lab.report.redact import redact_data

Stage = Literal["source", "gate", "kernel", "compile", "checkpoint", "server", "load", "lab"]


class Verdict(enum.StrEnum):
    """What happened to one subject. The words are never mixed: a refusal is not a crash, a skip is not a pass."""

    OK = "ok"
    WRONG = "wrong"
    CRASH = "crash"
    HANG = "hang"
    UNSUPPORTED = "unsupported"  # the subject refused by itself
    OOM = "oom"
    NOT_RUN = "not_run"  # we did not try; the reason says why


# It was tried, and what came of it may not be used.
BAD = frozenset({Verdict.WRONG, Verdict.CRASH, Verdict.HANG, Verdict.OOM})


class WrongKind(enum.StrEnum):
    """How a wrong result is wrong."""

    NAN = "nan"
    GARBAGE = "garbage"
    INEXACT = "inexact"
    DEGRADED = "degraded"


@dataclasses.dataclass(frozen=True)
class Target:
    """The GPU asked about.

    cc: compute capability such as "12.0", or "cpu".
    present: whether the machine that wrote the record has it.
    name: product name where known.
    """

    cc: str
    present: bool = False
    name: str | None = None


@dataclasses.dataclass(frozen=True)
class Stack:
    """The versions that decide behaviour; None where that part is absent or unknown. Captured by `stack.capture()`."""

    sglang: str | None = None
    flashinfer: str | None = None
    kernel_package: str | None = None
    torch: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    driver: str | None = None
    gpu: str | None = None
    python: str | None = None
    machine: str | None = None
    lab_commit: str | None = None


@dataclasses.dataclass(frozen=True)
class Number:
    """One measured quantity. `low`/`high`: a 95 % interval where one was measured; `n`: samples behind it."""

    name: str
    value: float
    unit: str
    low: float | None = None
    high: float | None = None
    n: int | None = None


@dataclasses.dataclass(frozen=True)
class Evidence:
    """One record from any stage.

    subject: colon-separated as in facts, for example "moe:flashinfer_cutlass:modelopt_fp4" or "arm:bf16".
    kind: set if and only if the verdict is WRONG.
    reason: one sentence; required for every verdict but OK.
    artefacts: paths relative to the run folder.
    repro: a command that repeats it.
    details: JSON-able extras of the stage (place of the first bad row, hops of a route, ...).
    """

    stage: Stage
    subject: str
    target: Target
    stack: Stack
    verdict: Verdict
    repro: str
    reason: str = ""
    kind: WrongKind | None = None
    numbers: tuple[Number, ...] = ()
    artefacts: tuple[str, ...] = ()
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    written_at: str = dataclasses.field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    )

    def __post_init__(self):
        if (self.kind is not None) != (self.verdict is Verdict.WRONG):
            raise ValueError(
                f"{self.subject}: kind is {self.kind!r} with verdict {self.verdict!r}; wrong needs a kind, others have none"
            )
        if self.verdict is not Verdict.OK and not self.reason:
            raise ValueError(f"{self.subject}: verdict {self.verdict!r} needs a reason")

    def number(self, name: str) -> Number | None:
        """The number of that name, or None."""
        return next((number for number in self.numbers if number.name == name), None)

    def to_json(self) -> str:
        """One line of JSON. Non-finite floats become null: the line stays valid JSON."""
        return json.dumps(_finite(dataclasses.asdict(self)), ensure_ascii=False, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> "Evidence":
        """Inverse of `to_json`; raises ValueError on anything else."""
        row = json.loads(line)
        try:
            return cls(
                **row
                | {
                    "target": Target(**row["target"]),
                    "stack": Stack(**row["stack"]),
                    "verdict": Verdict(row["verdict"]),
                    "kind": WrongKind(row["kind"]) if row.get("kind") else None,
                    "numbers": tuple(Number(**number) for number in row.get("numbers", ())),
                    "artefacts": tuple(row.get("artefacts", ())),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an evidence record: {error}") from error


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


class Ledger:
    """Append-only JSONL of Evidence; many processes may append to one file and read it meanwhile.

    Each record is one `write` of one whole line to a file opened with O_APPEND, so lines of different writers never
    mix. A line torn by a killed writer is skipped on reading; the next append starts on a fresh line.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)

    def append(self, *records: Evidence) -> None:
        """Write each record as one line and have it on disk before returning. Raises OSError (no space, no rights)."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            for record in records:
                line = json.dumps(redact_data(json.loads(record.to_json())), ensure_ascii=False).encode() + b"\n"
                size = os.fstat(handle).st_size
                torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
                written = os.write(handle, (b"\n" if torn else b"") + line)
                if written < len(line):
                    raise OSError(f"{self.path}: only {written} of {len(line)} bytes written; is the disk full?")
            os.fsync(handle)
        finally:
            os.close(handle)

    def __iter__(self) -> Iterator[Evidence]:
        """All whole records in the order written. A torn or foreign line is skipped; see `damaged`."""
        return (record for record in self._parsed() if record is not None)

    def damaged(self) -> int:
        """How many lines could not be read (torn by a killed writer, or not ours)."""
        return sum(record is None for record in self._parsed())

    def _parsed(self) -> Iterator[Evidence | None]:
        if not self.path.exists():
            return
        with self.path.open(encoding="utf-8", errors="replace") as lines:
            for line in filter(str.strip, lines):
                try:
                    yield Evidence.from_json(line)
                except ValueError:
                    yield None
