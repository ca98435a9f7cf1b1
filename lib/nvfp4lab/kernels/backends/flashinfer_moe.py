"""FlashInfer's fused MoE kernels that take W4A4 operands: CUTLASS, TRT-LLM (routed), CuTe-DSL, b12x, and the masked grouped GEMM.

All but the masked one want W13 as [up, gate] (SGLang: `load_up_proj_weight_first`). Preparation is SGLang's where it has a
function for it. Read in sglang 0.5.23 (modelopt_quant.py, moe_runner/flashinfer_*.py) and flashinfer 0.6.15.post1.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from nvfp4lab.kernels.backends.base import Launch, needs_gpu
from nvfp4lab.kernels.operands import Fp4Operand, MoeProblem
from nvfp4lab.kernels.shapes import BLOCK, MoeShape
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
    """One fused MoE function: `prepare_with(problem)` and `launch_with(prepared, problem, out)` hold what differs."""

    name: str
    prepare_with: Callable[[MoeProblem], Any]
    launch_with: Callable[[Any, MoeProblem, torch.Tensor], Launch]
    packages: tuple[str, ...] = ("flashinfer",)
    conventions: tuple[str, ...] = (ONE_SCALE,)
    expert_parallel: bool = True
    op: str = "moe"
    activations: str = "fp4"
    arithmetic: str = "fp4"
    variants: tuple[str, ...] = ("tactics", "autotune", "off_bucket", "cuda_graph", "streams")

    def is_available(self) -> str | None:
        return needs_gpu(*self.packages)

    def can_run(self, target: Target, shape: MoeShape) -> str | None:
        if not self.expert_parallel and shape.all_experts != shape.experts:
            return "this entry point has no expert offset"
        return None

    def prepare(self, problem: MoeProblem) -> Any:
        return self.prepare_with(problem)

    def bind(self, prepared: Any, problem: MoeProblem, out: torch.Tensor) -> Launch:
        return self.launch_with(prepared, problem, out)


def _prepare_cutlass(problem: MoeProblem) -> dict[str, Any]:
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


def _launch_cutlass(prepared: dict[str, Any], problem: MoeProblem, out: torch.Tensor) -> Launch:
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


def _prepare_trtllm(problem: MoeProblem) -> dict[str, Any]:
    from sglang.srt.layers.quantization.utils import prepare_static_weights_for_trtllm_fp4_moe

    packed = packed_experts(problem, up_first=True)
    experts, hidden, intermediate = problem.experts, problem.out_shape[1], problem.gate.codes.shape[1]
    shuffled = prepare_static_weights_for_trtllm_fp4_moe(
        packed.w13, packed.w2, packed.w13_scale, packed.w2_scale, hidden, intermediate, experts
    )
    names = ("gemm1_weights", "gemm1_weights_scale", "gemm2_weights", "gemm2_weights_scale")
    return dict(zip(names, shuffled, strict=True)) | {
        "output1_scale_scalar": (packed.inner_encode * packed.up_alpha).float(),
        "output1_scale_gate_scalar": packed.gate_alpha,
        "output2_scale_scalar": packed.down_alpha,
        "intermediate_size": intermediate,
    }


def _launch_trtllm_routed(prepared: dict[str, Any], problem: MoeProblem, out: torch.Tensor) -> Launch:
    from flashinfer.fused_moe import trtllm_fp4_block_scale_routed_moe

    packed = problem.activations.packed()
    weight_bits = problem.topk_weights.bfloat16().view(torch.int16).int() & 0xFFFF
    routing = (problem.topk_ids << 16) | weight_bits
    none = dict.fromkeys(("routing_bias", "gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias", "n_group"))

    def launch() -> torch.Tensor:
        return trtllm_fp4_block_scale_routed_moe(
            topk_ids=routing,
            hidden_states=packed.codes,
            hidden_states_scale=packed.block_scale,
            num_experts=problem.experts_global,
            top_k=problem.topk_ids.shape[1],
            topk_group=None,
            local_expert_offset=problem.expert_offset,
            local_num_experts=problem.experts,
            routed_scaling_factor=None,
            routing_method_type=1,
            output=out,
            **none,
            **prepared,
        )[0]

    return launch


def _launch_trtllm_logits(prepared: dict[str, Any], problem: MoeProblem, out: torch.Tensor) -> Launch:
    """The kernel routes for itself (top-k, then softmax): logits are chosen so that it arrives at the problem's routing."""
    from flashinfer.fused_moe import trtllm_fp4_block_scale_moe

    packed = problem.activations.packed()
    logits = torch.full((packed.codes.shape[0], problem.experts_global), -1e4, device=problem.device)
    logits.scatter_(1, problem.topk_ids.long(), problem.topk_weights.log())
    total = problem.topk_weights.sum(1, keepdim=True)
    none = dict.fromkeys(("routing_bias", "gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias", "n_group"))

    def launch() -> torch.Tensor:
        result = trtllm_fp4_block_scale_moe(
            routing_logits=logits.bfloat16(),
            hidden_states=packed.codes,
            hidden_states_scale=packed.block_scale,
            num_experts=problem.experts_global,
            top_k=problem.topk_ids.shape[1],
            topk_group=None,
            local_expert_offset=problem.expert_offset,
            local_num_experts=problem.experts,
            routed_scaling_factor=None,
            routing_method_type=1,
            **none,
            **prepared,
        )[0]
        return (result.float() * total).to(out.dtype)

    return launch


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

    packed = problem.activations.packed()
    return lambda: cute_dsl_fused_moe_nvfp4(
        x=packed.codes,
        x_sf=packed.block_scale.view(torch.uint8).unsqueeze(-1),
        token_selected_experts=problem.topk_ids,
        token_final_scales=problem.topk_weights,
        num_experts=problem.experts_global,
        top_k=problem.topk_ids.shape[1],
        num_local_experts=problem.experts,
        local_expert_offset=problem.expert_offset,
        output_dtype=out.dtype,
        moe_output=out,
        **prepared,
    )


def _prepare_b12x(problem: MoeProblem) -> dict[str, Any]:
    from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout

    packed = packed_experts(problem, up_first=True)
    return {
        "w1_weight": packed.w13,
        "w1_weight_sf": _mma_layout(convert_sf_to_mma_layout, packed.w13_scale, packed.w13),
        "w2_weight": packed.w2,
        "w2_weight_sf": _mma_layout(convert_sf_to_mma_layout, packed.w2_scale, packed.w2),
        "w1_alpha": packed.gate_alpha,
        "w2_alpha": packed.down_alpha,
        "fc2_input_scale": packed.inner_encode,
    }


def _launch_b12x(prepared: dict[str, Any], problem: MoeProblem, out: torch.Tensor) -> Launch:
    from flashinfer import b12x_fused_moe

    x = problem.activations.value(torch.bfloat16)
    return lambda: b12x_fused_moe(
        x=x,
        token_selected_experts=problem.topk_ids,
        token_final_scales=problem.topk_weights,
        num_experts=problem.experts_global,
        top_k=problem.topk_ids.shape[1],
        num_local_experts=problem.experts,
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


def _launch_masked(prepared: dict[str, Any], problem: MoeProblem, out: torch.Tensor) -> Launch:
    """Tokens are dealt out to their experts and the answers added up here: the kernel is the two grouped GEMMs between."""
    from sglang.srt.layers.moe.flashinfer_cutedsl_moe import flashinfer_cutedsl_moe_masked

    local = problem.topk_ids - problem.expert_offset
    pairs = [(local == expert).nonzero(as_tuple=True) for expert in range(problem.experts)]
    counts = torch.tensor([token.numel() for token, _ in pairs], dtype=torch.int32, device=problem.device)
    x = problem.activations.value(torch.bfloat16)
    dealt = torch.zeros(problem.experts, max(1, int(counts.max())), x.shape[1], dtype=x.dtype, device=x.device)
    for expert, (token, _) in enumerate(pairs):
        dealt[expert, : token.numel()] = x[token]
    encode = (1.0 / problem.activations.global_scale).float().expand(problem.experts).contiguous()

    def launch() -> torch.Tensor:
        answers = flashinfer_cutedsl_moe_masked((dealt, None), encode, masked_m=counts, **prepared)
        total = torch.zeros(problem.out_shape, device=x.device)
        for expert, (token, slot) in enumerate(pairs):
            total.index_add_(0, token, answers[expert, : token.numel()].float() * problem.topk_weights[token, slot, None])
        return out.copy_(total)

    return launch


_BOTH = ("flashinfer", "sglang")
BACKENDS = (
    FlashinferMoe("flashinfer.cutlass_fused_moe", _prepare_cutlass, _launch_cutlass),
    FlashinferMoe("flashinfer.trtllm_fp4_block_scale_routed_moe", _prepare_trtllm, _launch_trtllm_routed, _BOTH, conventions=()),
    FlashinferMoe(
        "flashinfer.trtllm_fp4_block_scale_moe",
        _prepare_trtllm,
        _launch_trtllm_logits,
        _BOTH,
        conventions=("routes for itself, in bf16",),
    ),
    FlashinferMoe("flashinfer.cute_dsl_fused_moe_nvfp4", _prepare_cute_dsl, _launch_cute_dsl, _BOTH),
    FlashinferMoe("flashinfer.b12x_fused_moe", _prepare_b12x, _launch_b12x, expert_parallel=False),
    FlashinferMoe("flashinfer.grouped_gemm_nt_masked", _prepare_masked, _launch_masked, _BOTH),
)
