"""SGLang's own CUTLASS FP4 GEMM, in the versions that ship it (sgl_kernel; gone from SGLang's routes by 0.5.17).

Read in sglang 0.5.9: `sgl_kernel.cutlass_scaled_fp4_mm(a, b, scale_a, scale_b, alpha, dtype)`, scales in 128x4 tiles, and
srt/layers/moe/cutlass_moe.py `cutlass_moe_fp4`, which calls `cutlass_fp4_group_mm` twice.
"""

import dataclasses
import importlib.util

import torch

from nvfp4lab.kernels.backends.base import Launch, needs_gpu
from nvfp4lab.kernels.backends.flashinfer_mm_fp4 import packed_swizzled
from nvfp4lab.kernels.backends.flashinfer_moe import packed_experts, swizzled
from nvfp4lab.kernels.operands import GemmProblem, MoeProblem
from nvfp4lab.kernels.shapes import GemmShape, MoeShape
from nvfp4lab.records import Target


@dataclasses.dataclass(frozen=True)
class ScaledFp4Mm:
    """`sgl_kernel.cutlass_scaled_fp4_mm`."""

    name: str = "sglang.cutlass_scaled_fp4_mm"
    op: str = "gemm"
    activations: str = "fp4"
    arithmetic: str = "fp4"
    conventions: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("cuda_graph", "streams")

    def is_available(self) -> str | None:
        return needs_gpu("sgl_kernel") or _lacks("cutlass_scaled_fp4_mm")

    def can_run(self, target: Target, shape: GemmShape) -> str | None:
        return None

    def prepare(self, problem: GemmProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return packed_swizzled(problem.weights)

    def bind(self, prepared: tuple[torch.Tensor, torch.Tensor, torch.Tensor], problem: GemmProblem, out: torch.Tensor) -> Launch:
        from sgl_kernel import cutlass_scaled_fp4_mm

        weight, weight_scale, weight_global = prepared
        codes, scale, activation_global = packed_swizzled(problem.activations)
        scales = (scale.view(torch.float8_e4m3fn), weight_scale.view(torch.float8_e4m3fn))
        alpha = (activation_global * weight_global).reshape(1)
        return lambda: cutlass_scaled_fp4_mm(codes, weight, *scales, alpha, out.dtype)


@dataclasses.dataclass(frozen=True)
class Fp4GroupMm:
    """`cutlass_moe_fp4` of SGLang: two `cutlass_fp4_group_mm` with SiLU between."""

    name: str = "sglang.cutlass_fp4_group_mm"
    op: str = "moe"
    activations: str = "fp4"
    arithmetic: str = "fp4"
    conventions: tuple[str, ...] = ("one global scale for gate and up (the gate's)",)
    variants: tuple[str, ...] = ("cuda_graph", "streams")

    def is_available(self) -> str | None:
        return needs_gpu("sgl_kernel", "sglang") or _lacks("cutlass_fp4_group_mm")

    def can_run(self, target: Target, shape: MoeShape) -> str | None:
        return "this entry point has no expert offset" if shape.all_experts != shape.experts else None

    def prepare(self, problem: MoeProblem) -> dict:
        from sglang.srt.layers.moe.cutlass_moe_params import CutlassMoEParams, CutlassMoEType

        packed = packed_experts(problem, up_first=False)
        experts, (_, hidden), intermediate = problem.experts, problem.out_shape, problem.gate.codes.shape[1]
        kind = CutlassMoEType.BlockscaledFP4
        return {
            "a1_gscale": (1.0 / problem.activations.global_scale).float().expand(experts).contiguous(),
            "w1_fp4": packed.w13,
            "w1_blockscale": swizzled(packed.w13_scale),
            "w1_alphas": packed.gate_alpha,
            "a2_gscale": packed.inner_encode.expand(experts).contiguous(),
            "w2_fp4": packed.w2,
            "w2_blockscale": swizzled(packed.w2_scale),
            "w2_alphas": packed.down_alpha,
            "params": CutlassMoEParams(
                kind, device=problem.device, num_experts=experts, intermediate_size_per_partition=intermediate, hidden_size=hidden
            ),
        }

    def bind(self, prepared: dict, problem: MoeProblem, out: torch.Tensor) -> Launch:
        from sglang.srt.layers.moe.cutlass_moe import cutlass_moe_fp4

        x = problem.activations.value(torch.bfloat16)
        return lambda: cutlass_moe_fp4(
            a=x, topk_weights=problem.topk_weights, topk_ids=problem.topk_ids, apply_router_weight_on_input=False, **prepared
        )


def _lacks(function: str) -> str | None:
    """None, or that the installed kernel package has no such function."""
    if importlib.util.find_spec("sgl_kernel") is None:
        return "sgl_kernel is not installed here"
    import sgl_kernel

    return None if hasattr(sgl_kernel, function) else f"this sgl_kernel has no {function}"


BACKENDS = (ScaledFp4Mm(), Fp4GroupMm())
