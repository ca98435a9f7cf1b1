"""What a perfect W4A4 kernel computes: inputs of FP4 layers rounded to NVFP4 with the checkpoint's own input scales.

Marlin leaves activations in bf16 (W4A16); the native kernels of SM100 and SM120 do not, and their loss is no fault. This turns
an ideal W4A16 model in transformers into an ideal W4A4 one. The scale of a GEMM is the largest `input_scale` of the
projections that it fuses, and of all experts of a layer, as SGLang hands it to FlashInfer's CUTLASS and TRT-LLM kernels.
"""

import types
from pathlib import Path
from typing import Any

import torch

from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.checkpoint import open_checkpoint
from nvfp4lab.nvfp4.checkpoint_modules import modules_of, shares_one_scale
from nvfp4lab.nvfp4.checkpoint_scales import read_scales


def round_activations(model: torch.nn.Module, nvfp4_dir: Path | str) -> int:
    """Make every FP4 layer of `model` round its inputs; the number of layers (an experts block counts once).

    nvfp4_dir: the NVFP4 checkpoint whose dequantised weights `model` holds. Raises LabError when a layer is not found.
    """
    scales = _input_scales(nvfp4_dir)
    modules = dict(model.named_modules())
    for path, scale in scales.items():
        module = modules.get(path)
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _module, inputs, scale=scale["input"]: (_rounded(inputs[0], scale),))
        elif module is not None and hasattr(module, "gate_up_proj") and hasattr(module, "down_proj"):
            module.forward = types.MethodType(_experts_forward(scale["input"], scale["down"]), module)
        else:
            raise LabError(f"{path}: FP4 in {nvfp4_dir}, but transformers has no such Linear or experts block")
    return len(scales)


def _input_scales(nvfp4_dir: Path | str) -> dict[str, dict[str, float]]:
    """{module path: {"input": scale}}, for an experts block {"input": of gate and up, "down": of down}."""
    checkpoint = open_checkpoint(nvfp4_dir)
    modules = modules_of(checkpoint.tensors, checkpoint.text_config.get("num_hidden_layers"))
    infos = {path: module.tensors["input_scale"] for path, module in modules.items() if "input_scale" in module.tensors}
    values = read_scales(infos.values(), ()).scalars
    result: dict[str, dict[str, float]] = {}
    for path, info in infos.items():
        module = modules[path]
        if module.is_routed:
            place, key = result.setdefault(module.block, {}), "down" if module.leaf in ("down_proj", "w2") else "input"
            place[key] = max(place.get(key, 0.0), max(values[info.name]))
        else:
            group = [infos[member] for member in shares_one_scale(module) if member in infos]
            result[path] = {"input": max(max(values[member.name]) for member in group)}
    return result


def _rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    return codec.dequantize(codec.quantize(x.contiguous(), global_scale=scale), x.dtype)


def _experts_forward(input_scale: float, down_scale: float) -> Any:
    """A forward for transformers' stacked experts (gate_up_proj [E, 2I, H], down_proj [E, H, I]) with both inputs rounded."""

    def forward(self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(hidden_states)
        x = _rounded(hidden_states, input_scale)
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            gate, up = torch.nn.functional.linear(x[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            inner = _rounded(self.act_fn(gate) * up, down_scale)
            out = torch.nn.functional.linear(inner, self.down_proj[expert]) * top_k_weights[token, place, None]
            result.index_add_(0, token, out.to(result.dtype))
        return result

    return forward
