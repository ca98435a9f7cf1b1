"""One kernel experiment as data: which backend, which probe, which shape. Picklable, so that a child process can run it.

`run_case(case)` is what a worker calls; `open_case(case)` is the same experiment opened up for timing. Verdict mapping:
an absent package or GPU is `not_run`, what the kernel refuses by itself is `unsupported` in its own words, exhausted
memory is `oom`, a failed gate is `wrong`. Every other exception propagates: whoever runs the case records a crash.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nvfp4lab.errors import LabError
from nvfp4lab.kernels.shapes import GemmShape, MoeShape, Shape
from nvfp4lab.records import Evidence, Number, Stack, Target, Verdict, WrongKind

Option = str | int | float | bool


@dataclasses.dataclass(frozen=True)
class Case:
    """One experiment.

    backend, probe: names in `backends.BACKENDS` and `probes.PROBES`.
    options: backend switches as sorted pairs, for example (("autotune", True), ("cuda_graph", True)); hashable.
    timed: also measure speed, if and only if the gate passes before and after.
    source: where the case comes from: a model and its split, or the id of a field report.
    """

    backend: str
    probe: str
    shape: Shape
    seed: int = 0
    options: tuple[tuple[str, Option], ...] = ()
    timed: bool = False
    source: str = ""

    @property
    def subject(self) -> str:
        """Colon-separated as in facts: "gemm:flashinfer_mm_fp4.cudnn:exact_t24:m16n512k1024"."""
        extra = "".join(f":{name}={value}" for name, value in self.options)
        return f"{self.shape.op}:{self.backend}:{self.probe}:{self.shape.label}{extra}"

    @property
    def repro(self) -> str:
        """The command that repeats this case alone."""
        return f"nvfp4lab kernels --case {shlex.quote(self.to_json())}"

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        return json.dumps(dataclasses.asdict(self) | {"op": self.shape.op}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "Case":
        """Inverse of `to_json`. Raises LabError on anything else."""
        try:
            row = json.loads(line)
            shape = {"gemm": GemmShape, "moe": MoeShape}[row.pop("op")](**row.pop("shape"))
            return cls(**row | {"shape": shape, "options": tuple((name, value) for name, value in row.get("options", ()))})
        except (ValueError, KeyError, TypeError) as error:
            raise LabError(f"not a kernel case: {line!r}: {error}") from error


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """What a case found; picklable. `details` is JSON-able (place of the first bad value, conventions, options)."""

    verdict: Verdict
    reason: str = ""
    kind: WrongKind | None = None
    numbers: tuple[Number, ...] = ()
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def evidence(self, case: Case, target: Target, stack: Stack) -> Evidence:
        """This result as a ledger record."""
        details = dict(self.details) | {"case": json.loads(case.to_json())} | ({"source": case.source} if case.source else {})
        return Evidence(
            "kernel", case.subject, target, stack, self.verdict, case.repro, self.reason, self.kind, self.numbers, details=details
        )


@dataclasses.dataclass(frozen=True)
class OpenCase:
    """A case made ready on its device. Live objects: never pickled.

    call: runs the kernel once on prepared operands and returns its output.
    check: gates one output of `call`.
    flops, min_bytes: the work of one call; bytes count each operand once, as stored.
    """

    call: Callable[[], torch.Tensor]
    check: Callable[[torch.Tensor], CaseResult]
    flops: float
    min_bytes: float
    device: torch.device


def open_case(case: Case) -> OpenCase:
    """Build operands and prepare weights. Raises what the backend raises, and NotRun where it cannot be tried here."""
    raise NotImplementedError


def run_case(case: Case) -> CaseResult:
    """Run one case here and now: call, gate and, for a timed case, time and gate again."""
    raise NotImplementedError
