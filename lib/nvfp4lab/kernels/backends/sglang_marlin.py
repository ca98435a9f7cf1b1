"""SGLang's weight-only (W4A16) Marlin kernels: what NVFP4 runs on where no FP4 tensor core is, and an option where one is.

Weights are prepared by SGLang's own load-time functions on a stand-in layer, so that what is tested is what a server runs.
Read in sglang 0.5.17 and 0.5.23: srt/layers/quantization/marlin_utils_fp4.py, srt/layers/moe/fused_moe_triton/fused_marlin_moe.py.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch

from nvfp4lab.kernels.backends.base import (
    GLOBAL_SCALES_IN_BF16,
    ROUNDED_BEFORE_SCALING,
    SMALL_WEIGHTS_FLUSHED,
    SPLIT_K_IN_BF16,
    Launch,
    needs_gpu,
)
from nvfp4lab.kernels.operands import Fp4Operand, GemmProblem, MoeProblem, activation_values
from nvfp4lab.kernels.shapes import GemmShape, MoeShape
from nvfp4lab.records import Target


class _Layer(torch.nn.Module):
    """Holds the tensors under the names that SGLang's preparation reads and writes."""

    def __init__(self, tensors: dict[str, torch.Tensor], settings: dict[str, Any]):
        super().__init__()
        for name, tensor in tensors.items():
            setattr(self, name, torch.nn.Parameter(tensor, requires_grad=False))
        for name, value in settings.items():
            setattr(self, name, value)


@dataclasses.dataclass(frozen=True)
class MarlinDense:
    """`apply_fp4_marlin_linear`, that is `gptq_marlin_gemm` with SGLang's choice of reduction."""

    name: str = "sglang.gptq_marlin_gemm"
    op: str = "gemm"
    activations: str = "bf16"
    arithmetic: str = "bf16"
    conventions: tuple[str, ...] = (GLOBAL_SCALES_IN_BF16, SPLIT_K_IN_BF16, SMALL_WEIGHTS_FLUSHED, ROUNDED_BEFORE_SCALING)
    variants: tuple[str, ...] = ("cuda_graph", "streams")

    def is_available(self) -> str | None:
        return needs_gpu("sglang")

    def can_run(self, target: Target, shape: GemmShape) -> str | None:
        return None

    def prepare(self, problem: GemmProblem) -> _Layer:
        from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_nvfp4_layer_for_marlin

        packed = problem.weights.packed()
        n, k = packed.shape
        tensors = {
            "weight": packed.codes,
            "weight_scale": packed.block_scale,
            "weight_global_scale": packed.global_scale.reshape(()),
        }
        settings = {"output_size_per_partition": n, "input_size_per_partition": k, "params_dtype": torch.bfloat16}
        layer = _Layer(tensors, settings | {"quant_config": SimpleNamespace(group_size=16)})
        prepare_nvfp4_layer_for_marlin(layer)
        return layer

    def bind(self, prepared: _Layer, problem: GemmProblem, out: torch.Tensor) -> Launch:
        from sglang.srt.layers.quantization.marlin_utils_fp4 import apply_fp4_marlin_linear

        x = activation_values(problem.activations, torch.bfloat16).contiguous()
        # A layer has one workspace of locks and is never run twice at once; calls on several streams are as several layers.
        workspace = torch.zeros_like(prepared.workspace)
        return lambda: apply_fp4_marlin_linear(
            input=x,
            weight=prepared.weight,
            weight_scale=prepared.weight_scale,
            weight_global_scale=prepared.weight_global_scale,
            workspace=workspace,
            size_n=prepared.output_size_per_partition,
            size_k=prepared.input_size_per_partition,
        )


@dataclasses.dataclass(frozen=True)
class MarlinMoe:
    """`fused_marlin_moe`: two `moe_wna16_marlin_gemm` with SiLU between them and a sum over top-k."""

    name: str = "sglang.moe_wna16_marlin_gemm"
    op: str = "moe"
    activations: str = "bf16"
    arithmetic: str = "bf16"
    conventions: tuple[str, ...] = (
        GLOBAL_SCALES_IN_BF16,
        SPLIT_K_IN_BF16,
        SMALL_WEIGHTS_FLUSHED,
        ROUNDED_BEFORE_SCALING,
        "one global scale for gate and up (the gate's), as SGLang's loader keeps it",
    )
    variants: tuple[str, ...] = ("cuda_graph", "streams")

    def is_available(self) -> str | None:
        return needs_gpu("sglang")

    def can_run(self, target: Target, shape: MoeShape) -> str | None:
        if shape.all_experts != shape.experts:
            return "expert-parallel Marlin is another module (minutes to build) and needs the dispatcher's expert map"
        return None

    def prepare(self, problem: MoeProblem) -> _Layer:
        from sglang.srt.layers.quantization.marlin_utils_fp4 import prepare_moe_nvfp4_layer_for_marlin

        gate, up, down = (part.packed() for part in (problem.gate, problem.up, problem.down))
        tensors = {
            "w13_weight": torch.cat([gate.codes, up.codes], 1),
            "w13_weight_scale": torch.cat([gate.block_scale.view(torch.uint8), up.block_scale.view(torch.uint8)], 1).view(
                torch.float8_e4m3fn
            ),
            "w13_weight_scale_2": gate.global_scale,
            "w2_weight": down.codes,
            "w2_weight_scale": down.block_scale,
            "w2_weight_scale_2": down.global_scale,
        }
        settings = {
            "quant_config": SimpleNamespace(group_size=16),
            "moe_runner_config": SimpleNamespace(is_gated=True),
            "intermediate_size_per_partition": gate.shape[1],
            "params_dtype": torch.bfloat16,
        }
        layer = _Layer(tensors, settings)
        prepare_moe_nvfp4_layer_for_marlin(layer)
        return layer

    def bind(self, prepared: _Layer, problem: MoeProblem, out: torch.Tensor) -> Launch:
        from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import fused_marlin_moe
        from sglang.srt.layers.quantization.marlin_utils import marlin_make_workspace

        activations = problem.activations
        x = (activations.value(torch.bfloat16) if isinstance(activations, Fp4Operand) else activations).contiguous()
        logits = torch.zeros(x.shape[0], problem.experts, device=x.device)  # only its length is read
        return lambda: fused_marlin_moe(
            hidden_states=x,
            w1=prepared.w13_weight,
            w2=prepared.w2_weight,
            w1_scale=prepared.w13_weight_scale,
            w2_scale=prepared.w2_weight_scale,
            gating_output=logits,
            topk_weights=problem.topk_weights,
            topk_ids=problem.topk_ids,
            w1_global_scale=prepared.w13_weight_scale_2,
            w2_global_scale=prepared.w2_weight_scale_2,
            # One a call, as in SGLang's runner: its locks must not be shared by calls that overlap.
            workspace=marlin_make_workspace(x.device, 4),
            num_bits=4,
        )


BACKENDS = (MarlinDense(), MarlinMoe())
