"""`flashinfer.fused_moe.cutlass_fused_moe` on operands that are quantised beforehand."""

from typing import Any

import torch

from nvfp4lab.kernels.backends.base import Launch
from nvfp4lab.kernels.backends.flashinfer_moe import BLACKWELL, FlashinferMoe, packed_experts, swizzled
from nvfp4lab.kernels.operands import MoeProblem
from nvfp4lab.nvfp4.layouts import SWIZZLED_128X4


def _prepare(problem: MoeProblem) -> dict[str, Any]:
    packed = packed_experts(problem, up_first=True)
    outer_encode = (1.0 / problem.activations.global_scale).float().reshape(1)
    scales = [
        outer_encode,
        swizzled(packed.w13_scale).view(torch.int32),
        packed.gate_alpha,
        packed.inner_encode,
        swizzled(packed.w2_scale).view(torch.int32),
        packed.down_alpha,
    ]
    return {
        "fc1_expert_weights": packed.w13.view(torch.long),
        "fc2_expert_weights": packed.w2.view(torch.long),
        "quant_scales": scales,
    }


def _launch(prepared: dict[str, Any], problem: MoeProblem, out: torch.Tensor) -> Launch:
    from flashinfer.fused_moe import cutlass_fused_moe

    packed = problem.activations.packed()
    scale = SWIZZLED_128X4.from_linear(packed.block_scale.view(torch.uint8))
    size = problem.experts_global // problem.experts

    def launch() -> torch.Tensor:
        cutlass_fused_moe(
            input=packed.codes,
            token_selected_experts=problem.topk_ids,
            token_final_scales=problem.topk_weights,
            output_dtype=out.dtype,
            input_sf=scale,
            ep_size=size,
            ep_rank=problem.expert_offset // problem.experts,
            output=out,
            **prepared,
        )
        return out

    return launch


BACKENDS = (FlashinferMoe("flashinfer.cutlass_fused_moe", _prepare, _launch, oldest=BLACKWELL),)
