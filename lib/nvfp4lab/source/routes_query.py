"""What is asked of the router, and what it answers: Query, Hop, Gate, Route."""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from nvfp4lab.errors import LabError
from nvfp4lab.source import capability
from nvfp4lab.source.values import Scenario

Operation = Literal["moe", "fp4_gemm"]
FLAG_FIELDS: dict[Operation, str] = {"moe": "moe_runner_backend", "fp4_gemm": "fp4_gemm_runner_backend"}
FLAGS: dict[Operation, str] = {"moe": "--moe-runner-backend", "fp4_gemm": "--fp4-gemm-backend"}
WORKS = "works as far as source shows"
LOST_ENUM = "depends on the backend's enum, which was not found"


@dataclasses.dataclass(frozen=True)
class Query:
    """One question. cc: "12.0". quant: effective quantisation of the checkpoint. flag_given: whether --quantization says so too.

    model_arch: `architectures[0]` of config.json, None when unknown (rules for all architectures are then kept apart).
    """

    cc: str
    quant: str = "modelopt_fp4"
    model_arch: str | None = None
    a2a: str = "none"
    tp: int = 1
    ep: int = 1
    gated: bool = True
    flag_given: bool = False

    def __post_init__(self):
        if re.fullmatch(capability.PATTERN, self.cc) is None:
            raise LabError(f"{self.cc!r} is not the compute capability of a GPU, such as 12.0", exit_code=2)
        if min(self.tp, self.ep) < 1 or self.tp % self.ep:
            raise LabError(f"ep {self.ep} must divide tp {self.tp}, and both be at least 1", exit_code=2)

    @property
    def capability(self) -> capability.Capability:
        return capability.parse(self.cc)

    @property
    def number(self) -> int:
        """Ten times the major plus the minor, as FlashInfer counts: 120."""
        major, minor = self.capability
        return 10 * major + minor

    def scenario(self, **flags: Any) -> Scenario:
        """The question as the evaluator takes it; `flags` are the resolved backends."""
        known = {"moe_a2a_backend": self.a2a, "tp_size": self.tp, "ep_size": self.ep, "is_gated": self.gated}
        known |= {"is_checkpoint_nvfp4_serialized": True, "is_nvfp4_online": False}  # the checkpoint holds FP4 already
        known |= {"moe_ep_size": self.ep, "moe_tp_size": max(self.tp // self.ep, 1)}
        return Scenario.of(self.capability, **(known | flags))


@dataclasses.dataclass(frozen=True)
class Hop:
    """One step of a route. file: member of the wheel."""

    file: str
    line: int
    why: str


@dataclasses.dataclass(frozen=True)
class Gate:
    """One condition on the way.

    state: "met" or "failed" where the query decides it, "depends" where source alone does not. refuses: a failed one stops
    the call with an error that names itself; False for a list that is only noted, which nothing checks.
    """

    text: str
    state: Literal["met", "failed", "depends"]
    file: str
    line: int
    refuses: bool = True


@dataclasses.dataclass(frozen=True)
class Route:
    """How one flag value becomes a kernel call. `when`: what else must hold for this route to be the one."""

    backend: str
    op: Operation
    when: Mapping[str, Any]
    hops: tuple[Hop, ...]
    gates: tuple[Gate, ...]
    final_call: str
    expected: str
    traps: tuple[str, ...] = ()

    @property
    def raises(self) -> bool:
        return self.expected.startswith("raises")

    @property
    def condition(self) -> str:
        """`when` in words; empty for a route without conditions."""
        return ", ".join(_in_words(name, value) for name, value in self.when.items())

    def to_json(self) -> dict[str, Any]:
        row = dataclasses.asdict(self)
        return row | {"when": dict(self.when), "hops": [dataclasses.asdict(hop) for hop in self.hops]}


def _in_words(name: str, value: Any) -> str:
    if value is True:
        return name.replace("_", " ")
    said = " or ".join(map(str, value)) if isinstance(value, list | tuple) else value
    return f"{'depends on' if name == 'depends_on' else name} {said}"
