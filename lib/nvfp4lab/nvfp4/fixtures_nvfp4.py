"""Calibrate and quantise fixture models to NVFP4 in the layout that ModelOpt writes and SGLang loads.

Per quantised Linear: `weight` uint8 [N, K/2], `weight_scale` float8_e4m3fn [N, K/16], `weight_scale_2` float32 [],
`input_scale` float32 []. Projections that a server fuses (q/k/v, gate/up) share both float32 scales, as ModelOpt's
export sees to it, because a fused GEMM has one.
"""

from collections.abc import Mapping
from importlib import resources
from typing import Any

import torch

from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.conventions import E2M1_MAX, E4M3_MAX
from nvfp4lab.nvfp4.fixtures_moe import MoeShape, neuron_order, up_exponent

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))

ChannelAmax = Mapping[str, torch.Tensor]  # module name -> largest |input| seen, by input channel, float32 [K]


def calibrate(model: torch.nn.Module, tokenizer: Any) -> dict[str, torch.Tensor]:
    """Largest magnitude of every input channel of every Linear over the calibration text. Seconds on one core."""
    amax: dict[str, torch.Tensor] = {}

    def record(name: str):
        def hook(_module, inputs, _output):
            seen = inputs[0].detach().float().abs().flatten(0, -2).amax(0)
            amax[name] = torch.maximum(amax[name], seen) if name in amax else seen

        return hook

    hooks = [m.register_forward_hook(record(name)) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    text = resources.files("nvfp4lab.nvfp4").joinpath("fixtures_calibration.txt").read_text(encoding="utf-8")
    try:
        with torch.inference_mode():
            model(tokenizer(text, return_tensors="pt").input_ids)
    finally:
        for hook in hooks:
            hook.remove()
    return amax


def moe_amax(dense: ChannelAmax, layers: int, shape: MoeShape) -> dict[str, torch.Tensor]:
    """Channel amax of every routed expert's projections, derived from those of the dense MLP that it was made from.

    Exact, as if every expert had seen every calibration token: an expert's intermediate activations are the dense
    ones in another order, times its power of two.
    """
    result = {}
    for layer in range(layers):
        mlp = f"model.layers.{layer}.mlp"
        intermediate = dense[f"{mlp}.down_proj"]
        for expert in range(shape.experts):
            prefix = f"{mlp}.experts.{expert}"
            result[f"{prefix}.gate_proj"] = result[f"{prefix}.up_proj"] = dense[f"{mlp}.gate_proj"]
            order = neuron_order(layer, expert, len(intermediate), shape)
            result[f"{prefix}.down_proj"] = intermediate[order] * 2.0 ** up_exponent(expert)
    return result


def quantise(tensors: Mapping[str, torch.Tensor], amax: ChannelAmax) -> dict[str, torch.Tensor]:
    """`tensors` with the weight of every module in `amax` replaced by its four NVFP4 tensors."""
    result = dict(tensors)
    for name in amax:
        group = fused_group(name)
        weight_amax = max(tensors[f"{member}.weight"].float().abs().max() for member in group)
        input_amax = max(amax[member].max() for member in group)
        quantised = codec.quantize(tensors[f"{name}.weight"], global_scale=weight_amax / (E2M1_MAX * E4M3_MAX))
        result[f"{name}.weight"] = quantised.codes
        result[f"{name}.weight_scale"] = quantised.block_scale
        result[f"{name}.weight_scale_2"] = quantised.global_scale
        result[f"{name}.input_scale"] = input_amax / (E2M1_MAX * E4M3_MAX)
    return result


def dequantised(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The bf16 model that an ideal W4A16 kernel computes with: every NVFP4 weight decoded and rounded to bf16."""
    suffixes = (".weight_scale", ".weight_scale_2", ".input_scale")
    result = {}
    for name, tensor in tensors.items():
        if f"{name}_scale_2" in tensors:
            quantised = codec.NVFP4Tensor(tensor, tensors[f"{name}_scale"], tensors[f"{name}_scale_2"])
            result[name] = codec.dequantize(quantised, torch.bfloat16)
        elif not name.endswith(suffixes):
            result[name] = tensor
    return result


def excluded_modules(layers: int, is_moe: bool) -> list[str]:
    """ModelOpt's `exclude_modules`: what stays bf16. In the MoE all but the routed experts, as in Qwen3.5-397B-A17B-NVFP4."""
    per_layer = ("self_attn*", "mlp.gate", "mlp.shared_expert*") if is_moe else ()
    return ["lm_head", *(f"model.layers.{layer}.{module}" for layer in range(layers) for module in per_layer)]


def hf_quant_config(excluded: list[str]) -> dict[str, Any]:
    """Content of hf_quant_config.json."""
    quantization = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": excluded}
    return {"producer": {"name": "modelopt", "version": "nvfp4lab"}, "quantization": quantization}


def quantization_config(excluded: list[str]) -> dict[str, Any]:
    """The `quantization_config` of config.json that ModelOpt writes beside it (modelopt.torch.export.convert_hf_config)."""
    operand = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "config_groups": {"group_0": {"input_activations": operand, "weights": operand, "targets": ["Linear"]}},
        "ignore": excluded,
        "quant_algo": "NVFP4",
        "producer": {"name": "modelopt", "version": "nvfp4lab"},
        "quant_method": "modelopt",
    }


def fused_group(module: str) -> tuple[str, ...]:
    """The names of all modules that a server fuses with this one, itself included."""
    parent, _, leaf = module.rpartition(".")
    return next((tuple(f"{parent}.{member}" for member in group) for group in _FUSED if leaf in group), (module,))
