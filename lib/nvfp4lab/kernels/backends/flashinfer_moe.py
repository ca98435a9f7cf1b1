"""What FlashInfer's fused MoE kernels share: weights fused and scaled as SGLang does at load time, and the backend's shape.

Read in sglang 0.5.23 (modelopt_quant.py, moe_runner/flashinfer_*.py) and flashinfer 0.6.15.post1. All but the masked grouped
GEMM want W13 as [up, gate] (SGLang: `load_up_proj_weight_first`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from nvfp4lab.kernels.backends.base import Launch, needs_gpu
from nvfp4lab.kernels.operands import Fp4Operand, MoeProblem
from nvfp4lab.kernels.shapes import MoeShape
from nvfp4lab.nvfp4.layouts import SWIZZLED_128X4
from nvfp4lab.records import Target

ONE_SCALE = "one global scale for gate and up (the gate's)"


@dataclasses.dataclass(frozen=True)
class PackedExperts:
    """Stacked weights as bytes. w13: [E, 2 I, H/2]; scales linear, e4m3 [E, rows, K/16]; global scales [E].

    gate_alpha, up_alpha, down_alpha: activation scale x weight scale of each GEMM. inner_encode: 1 / intermediate scale.
    """

    w13: torch.Tensor
    w13_scale: torch.Tensor
    w2: torch.Tensor
    w2_scale: torch.Tensor
    gate_alpha: torch.Tensor
    up_alpha: torch.Tensor
    down_alpha: torch.Tensor
    inner_encode: torch.Tensor


def packed_experts(problem: MoeProblem, up_first: bool) -> PackedExperts:
    """The problem's weights fused into W13 (in the given order) and W2."""
    gate, up, down = (part.packed() for part in (problem.gate, problem.up, problem.down))
    halves = (up, gate) if up_first else (gate, up)
    scales = torch.cat([half.block_scale.view(torch.uint8) for half in halves], 1).view(torch.float8_e4m3fn)
    outer = (
        problem.activations.global_scale if isinstance(problem.activations, Fp4Operand) else torch.ones((), device=problem.device)
    )
    return PackedExperts(
        torch.cat([half.codes for half in halves], 1),
        scales,
        down.codes,
        down.block_scale,
        (outer * gate.global_scale).float(),
        (outer * up.global_scale).float(),
        (problem.intermediate_scale * down.global_scale).float(),
        (1.0 / problem.intermediate_scale).float().reshape(1),
    )


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Block scales of all experts in 128x4 tiles, as e4m3."""
    return SWIZZLED_128X4.from_linear(scale.contiguous().view(torch.uint8)).view(torch.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class FlashinferMoe:
    """One fused MoE function: `prepare_with(problem)` and `launch_with(prepared, problem, out)` hold what differs.

    oldest: compute capability below which it is not tried. Only for functions that do not check it themselves before they
    build a module of many minutes; the others refuse in their own words.
    """

    name: str
    prepare_with: Callable[[MoeProblem], Any]
    launch_with: Callable[[Any, MoeProblem, torch.Tensor], Launch]
    packages: tuple[str, ...] = ("flashinfer",)
    conventions: tuple[str, ...] = (ONE_SCALE,)
    expert_parallel: bool = True
    oldest: tuple[int, int] = (0, 0)
    op: str = "moe"
    activations: str = "fp4"
    arithmetic: str = "fp4"
    variants: tuple[str, ...] = ("tactics", "autotune", "off_bucket", "cuda_graph", "streams")

    def is_available(self) -> str | None:
        return needs_gpu(*self.packages)

    def can_run(self, target: Target, shape: MoeShape) -> str | None:
        if target.cc != "cpu" and tuple(int(part) for part in target.cc.split(".")) < self.oldest:
            needed = ".".join(map(str, self.oldest))
            return f"needs compute capability {needed}; asked on {target.cc} it would build a module for minutes before it fails"
        if not self.expert_parallel and shape.all_experts != shape.experts:
            return "this entry point has no expert offset"
        return None

    def prepare(self, problem: MoeProblem) -> Any:
        return self.prepare_with(problem)

    def bind(self, prepared: Any, problem: MoeProblem, out: torch.Tensor) -> Launch:
        return self.launch_with(prepared, problem, out)


BLACKWELL = (10, 0)
BOTH_PACKAGES = ("flashinfer", "sglang")


def expert_range(problem: MoeProblem) -> dict[str, int]:
    """Arguments that most of these functions share: how many experts there are, and which ones are here."""
    return {"num_experts": problem.experts_global, "top_k": problem.topk_ids.shape[1], "num_local_experts": problem.experts}
