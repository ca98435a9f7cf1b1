"""The slow reference, and emulations of kernels with other accumulators. CPU or GPU, plain torch."""

import dataclasses

import torch

from nvfp4lab.kernels import reference, reference_marlin
from nvfp4lab.kernels.backends.base import GLOBAL_SCALES_IN_BF16, ROUNDED_BEFORE_SCALING, SMALL_WEIGHTS_FLUSHED, Launch
from nvfp4lab.kernels.operands import Fp4Operand, GemmProblem, MoeProblem, Problem, activation_values
from nvfp4lab.kernels.reference import Order
from nvfp4lab.kernels.reference_bounds import moe_value
from nvfp4lab.kernels.shapes import MoeShape, Shape
from nvfp4lab.records import Target

LARGEST_WEIGHT_ELEMENTS = 1 << 26  # beyond it an emulation takes minutes and proves nothing that a small one does not


def _too_large(shape: Shape) -> str | None:
    elements = 3 * shape.experts * shape.hidden * shape.intermediate if isinstance(shape, MoeShape) else shape.n * shape.k
    if elements <= LARGEST_WEIGHT_ELEMENTS:
        return None
    return f"{elements:,} weights are more than the {LARGEST_WEIGHT_ELEMENTS:,} that an emulation is run with"


@dataclasses.dataclass(frozen=True)
class TorchReference:
    """float64 products on dequantised operands, rounded once."""

    op: str
    activations: str = "fp4"
    arithmetic: str = "fp32"
    conventions: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"torch.reference_{self.op}"

    def is_available(self) -> str | None:
        return None

    def can_run(self, target: Target, shape: Shape) -> str | None:
        return _too_large(shape)

    def prepare(self, problem: Problem) -> torch.Tensor | None:
        return problem.weights.value().T.contiguous() if isinstance(problem, GemmProblem) else None

    def bind(self, prepared: torch.Tensor | None, problem: Problem, out: torch.Tensor) -> Launch:
        if isinstance(problem, GemmProblem):
            left = activation_values(problem.activations)
            return lambda: out.copy_(left @ prepared)
        return lambda: out.copy_(moe_value(problem))


@dataclasses.dataclass(frozen=True)
class Emulation:
    """A kernel that adds up in blocks of 64 columns into an accumulator of the given type."""

    op: str
    accumulator: torch.dtype
    activations: str = "fp4"
    arithmetic: str = "fp32"
    variants: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        kind = str(self.accumulator).removeprefix("torch.")
        return f"emulation.{self.op}_{kind}" + ("_w4a16" if self.activations == "bf16" else "")

    @property
    def conventions(self) -> tuple[str, ...]:
        return (
            ()
            if self.accumulator is torch.float32
            else (f"partial sums rounded to {str(self.accumulator).removeprefix('torch.')}",)
        )

    def is_available(self) -> str | None:
        return None

    def can_run(self, target: Target, shape: Shape) -> str | None:
        return _too_large(shape)

    def prepare(self, problem: Problem) -> torch.Tensor | None:
        return problem.weights.unscaled() if isinstance(problem, GemmProblem) else None

    def bind(self, prepared: torch.Tensor | None, problem: Problem, out: torch.Tensor) -> Launch:
        order = Order("blocked", 64, self.accumulator)
        if isinstance(problem, MoeProblem):
            asked = self._weight_only(problem)
            return lambda: reference.moe(asked, out, order)
        left, scale = reference.split_scale(problem.activations)
        alpha = scale * problem.weights.global_scale
        return lambda: out.copy_((reference.accumulate(left, prepared, order) * alpha).to(out.dtype))

    def _weight_only(self, problem: MoeProblem) -> MoeProblem:
        if self.activations == "fp4" or not isinstance(problem.activations, Fp4Operand):
            return problem
        return dataclasses.replace(problem, activations=problem.activations.value(torch.bfloat16))


@dataclasses.dataclass(frozen=True)
class MarlinEmulation:
    """SGLang's Marlin GEMM as an H200 showed it: shows on a CPU which probes it fails there, and why."""

    name: str = "emulation.gemm_marlin"
    op: str = "gemm"
    activations: str = "bf16"
    arithmetic: str = "fp32"
    conventions: tuple[str, ...] = (GLOBAL_SCALES_IN_BF16, SMALL_WEIGHTS_FLUSHED, ROUNDED_BEFORE_SCALING)
    variants: tuple[str, ...] = ()

    def is_available(self) -> str | None:
        return None

    def can_run(self, target: Target, shape: Shape) -> str | None:
        return _too_large(shape)

    def prepare(self, problem: GemmProblem) -> None:
        return None

    def bind(self, prepared: None, problem: GemmProblem, out: torch.Tensor) -> Launch:
        return lambda: reference_marlin.gemm(problem, out)


BACKENDS = (
    TorchReference("gemm"),
    TorchReference("moe"),
    *(Emulation(op, kind) for op in ("gemm", "moe") for kind in (torch.float32, torch.bfloat16, torch.float16)),
    *(Emulation("moe", kind, "bf16") for kind in (torch.float32, torch.bfloat16)),
    MarlinEmulation(),
)
