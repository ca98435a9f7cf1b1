"""TRT-LLM's FP4 block-scale MoE through FlashInfer: with the routing given, and routing for itself. Weights by SGLang's shuffle."""

from collections.abc import Callable
from typing import Any

import torch

from nvfp4lab.kernels.backends.base import ROUTES_FOR_ITSELF, Launch
from nvfp4lab.kernels.backends.flashinfer_moe import BLACKWELL, BOTH_PACKAGES, FlashinferMoe, packed_experts
from nvfp4lab.kernels.operands import MoeProblem

_NOT_GIVEN = dict.fromkeys(
    ("routing_bias", "gemm1_bias", "gemm1_alpha", "gemm1_beta", "gemm1_clamp_limit", "gemm2_bias", "n_group", "topk_group")
)
RENORMALISE = 1  # routing method: top-k, then softmax
NO_WEIGHT, NOT_CHOSEN = -1e3, -1e4  # logits: chosen, with a weight of 0 in fp32; not even chosen


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

    weight_bits = problem.topk_weights.bfloat16().view(torch.int16).int() & 0xFFFF
    routing = (problem.topk_ids << 16) | weight_bits
    return _launch(trtllm_fp4_block_scale_routed_moe, problem, prepared | {"topk_ids": routing, "output": out})


def _launch_trtllm_logits(prepared: dict[str, Any], problem: MoeProblem, out: torch.Tensor) -> Launch:
    """The kernel routes for itself (top-k, then softmax): logits are chosen so that it arrives at the problem's routing.

    Router weights must add up to 1, as a model's do and those of `Form.even_routing`.
    """
    from flashinfer.fused_moe import trtllm_fp4_block_scale_moe

    logits = torch.full((problem.topk_ids.shape[0], problem.experts_global), NOT_CHOSEN, device=problem.device)
    logits.scatter_(1, problem.topk_ids.long(), problem.topk_weights.log().clamp(min=NO_WEIGHT))
    return _launch(trtllm_fp4_block_scale_moe, problem, prepared | {"routing_logits": logits.bfloat16()})


def _launch(kernel: Callable[..., Any], problem: MoeProblem, own: dict[str, Any]) -> Launch:
    """own: the weights, and what one of the two kernels takes and the other does not."""
    packed = problem.activations.packed()
    return lambda: _first(
        kernel(
            hidden_states=packed.codes,
            hidden_states_scale=packed.block_scale,
            num_experts=problem.experts_global,
            top_k=problem.topk_ids.shape[1],
            local_expert_offset=problem.expert_offset,
            local_num_experts=problem.experts,
            routed_scaling_factor=None,
            routing_method_type=RENORMALISE,
            **_NOT_GIVEN,
            **own,
        )
    )


def _first(result: torch.Tensor | list[torch.Tensor]) -> torch.Tensor:
    """Some versions return a tensor, others a list that holds it."""
    return result if isinstance(result, torch.Tensor) else result[0]


BACKENDS = (
    FlashinferMoe(
        "flashinfer.trtllm_fp4_block_scale_routed_moe",
        _prepare_trtllm,
        _launch_trtllm_routed,
        BOTH_PACKAGES,
        conventions=(),
        oldest=BLACKWELL,
    ),
    FlashinferMoe(
        "flashinfer.trtllm_fp4_block_scale_moe",
        _prepare_trtllm,
        _launch_trtllm_logits,
        BOTH_PACKAGES,
        conventions=(ROUTES_FOR_ITSELF,),
        oldest=BLACKWELL,
    ),
)
