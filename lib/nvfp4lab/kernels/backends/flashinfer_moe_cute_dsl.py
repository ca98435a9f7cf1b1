"""FlashInfer's MoE kernels written in CuTe-DSL: SM100's, b12x of SM120, and the masked grouped GEMM behind DeepEP."""

import inspect
from collections.abc import Callable
from typing import Any

import torch

from nvfp4lab.kernels.backends.base import Launch
from nvfp4lab.kernels.backends.cute_dsl import mark_compiles
from nvfp4lab.kernels.backends.flashinfer_moe import BOTH_PACKAGES, ONE_SCALE, FlashinferMoe, expert_range, packed_experts, swizzled
from nvfp4lab.kernels.operands import MoeProblem
from nvfp4lab.kernels.shapes import BLOCK


def _prepare_cute_dsl(problem: MoeProblem) -> dict[str, Any]:
    from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout
    from sglang.srt.layers.moe.moe_runner.flashinfer_cutedsl import interleave_w13_halves

    packed = packed_experts(problem, up_first=True)
    w13 = interleave_w13_halves(packed.w13, group_size=64, dim=1).contiguous()
    w13_scale = interleave_w13_halves(packed.w13_scale.view(torch.uint8), group_size=64, dim=1).contiguous()
    return {
        "w1_weight": w13,
        "w1_weight_sf": _mma_layout(convert_sf_to_mma_layout, w13_scale.view(torch.float8_e4m3fn), w13),
        "w1_alpha": packed.gate_alpha,
        "fc2_input_scale": packed.inner_encode,
        "w2_weight": packed.w2,
        "w2_weight_sf": _mma_layout(convert_sf_to_mma_layout, packed.w2_scale, packed.w2),
        "w2_alpha": packed.down_alpha,
    }


def _mma_layout(convert: Callable[..., torch.Tensor], scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    experts, rows, bytes_ = weight.shape
    return convert(swizzled(scale).view(torch.uint8).reshape(-1), m=rows, k=2 * bytes_, num_groups=experts, sf_vec_size=BLOCK)


def _launch_cute_dsl(prepared: dict[str, Any], problem: MoeProblem, out: torch.Tensor) -> Launch:
    from flashinfer import cute_dsl_fused_moe_nvfp4

    mark_compiles()
    packed = problem.activations.packed()
    return lambda: cute_dsl_fused_moe_nvfp4(
        x=packed.codes,
        x_sf=packed.block_scale.view(torch.uint8).unsqueeze(-1),
        token_selected_experts=problem.topk_ids,
        token_final_scales=problem.topk_weights,
        **expert_range(problem),
        local_expert_offset=problem.expert_offset,
        output_dtype=out.dtype,
        moe_output=out,
        **prepared,
    )


BAKED = "before FlashInfer 0.6.17 the global scale of gate and up is multiplied into their E4M3 block scales, as vLLM does"


def _prepare_b12x(problem: MoeProblem) -> dict[str, Any]:
    """Scales as the kernel means them: it divides activations by `input_global_scale` and the intermediate by `fc2_input_scale`,
    and expects each in the multiplier (0.7.4 puts the first there itself). Before 0.6.17 `w1_alpha` is that divisor as well, so
    the product forgets it, and the weights' own scale has no place but the block scales. No SGLang up to 0.5.23 calls it.
    """
    from flashinfer import b12x_fused_moe
    from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout

    packed, outer = packed_experts(problem, up_first=True), problem.activations.global_scale.float()
    if "input_global_scale" in inspect.signature(b12x_fused_moe).parameters:
        w13_scale, first = packed.w13_scale, {"w1_alpha": problem.gate.global_scale.float(), "input_global_scale": outer.reshape(1)}
    else:
        w13_scale = (packed.w13_scale.float() * problem.gate.global_scale[:, None, None]).to(torch.float8_e4m3fn)
        first = {"w1_alpha": outer.expand(problem.experts).contiguous()}
    return first | {
        "w1_weight": packed.w13,
        "w1_weight_sf": _mma_layout(convert_sf_to_mma_layout, w13_scale, packed.w13),
        "w2_weight": packed.w2,
        "w2_weight_sf": _mma_layout(convert_sf_to_mma_layout, packed.w2_scale, packed.w2),
        "w2_alpha": packed.down_alpha,
        "fc2_input_scale": problem.intermediate_scale.float().reshape(1),
    }


def _launch_b12x(prepared: dict[str, Any], problem: MoeProblem, out: torch.Tensor) -> Launch:
    from flashinfer import b12x_fused_moe

    mark_compiles()
    x = problem.activations.value(torch.bfloat16)
    return lambda: b12x_fused_moe(
        x=x,
        token_selected_experts=problem.topk_ids,
        token_final_scales=problem.topk_weights,
        **expert_range(problem),
        output=out,
        **prepared,
    )


def _prepare_masked(problem: MoeProblem) -> dict[str, Any]:
    packed = packed_experts(problem, up_first=False)
    experts = problem.experts
    return {
        "w1": packed.w13,
        "w1_blockscale": swizzled(packed.w13_scale),
        "w1_alpha": packed.gate_alpha,
        "w2": packed.w2,
        "a2_global_scale": packed.inner_encode.expand(experts).contiguous(),
        "w2_blockscale": swizzled(packed.w2_scale),
        "w2_alpha": packed.down_alpha,
    }


ADDED_UP_HERE = "its answers are weighed and added up by the lab, which is part of its time"


def _launch_masked(prepared: dict[str, Any], problem: MoeProblem, out: torch.Tensor) -> Launch:
    """Tokens are dealt out to their experts and the answers added up here: the kernel is the two grouped GEMMs between."""
    from sglang.srt.layers.moe.flashinfer_cutedsl_moe import flashinfer_cutedsl_moe_masked

    mark_compiles()
    local = problem.topk_ids.long() - problem.expert_offset
    here = (local >= 0) & (local < problem.experts)
    place = torch.zeros_like(local)  # of each token among those of the expert that it asks
    x = problem.activations.value(torch.bfloat16)
    asked = [(local == expert).nonzero(as_tuple=True) for expert in range(problem.experts)]
    counts = torch.tensor([token.numel() for token, _ in asked], dtype=torch.int32, device=x.device)
    dealt = torch.zeros(problem.experts, max(1, int(counts.max())), x.shape[1], dtype=x.dtype, device=x.device)
    for expert, (token, slot) in enumerate(asked):
        place[token, slot] = torch.arange(token.numel(), device=x.device)
        dealt[expert, : token.numel()] = x[token]
    expert, weight, mine = local.where(here, 0), problem.topk_weights[..., None], here[..., None]
    encode = (1.0 / problem.activations.global_scale).float().expand(problem.experts).contiguous()

    def launch() -> torch.Tensor:
        answers = flashinfer_cutedsl_moe_masked((dealt, None), encode, masked_m=counts, **prepared)
        return out.copy_((answers[expert, place].float() * weight).where(mine, 0.0).sum(1))

    return launch


BACKENDS = (
    FlashinferMoe("flashinfer.cute_dsl_fused_moe_nvfp4", _prepare_cute_dsl, _launch_cute_dsl, BOTH_PACKAGES),
    FlashinferMoe("flashinfer.b12x_fused_moe", _prepare_b12x, _launch_b12x, conventions=(ONE_SCALE, BAKED), expert_parallel=False),
    FlashinferMoe(
        "flashinfer.grouped_gemm_nt_masked", _prepare_masked, _launch_masked, BOTH_PACKAGES, conventions=(ONE_SCALE, ADDED_UP_HERE)
    ),
)
