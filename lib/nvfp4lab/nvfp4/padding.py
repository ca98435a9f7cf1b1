"""Widen a Llama without changing its function, so that a small real model fits the shapes that FP4 kernels accept.

SmolLM2's hidden size 576 is no multiple of 128, which Marlin and the CUTLASS MoE kernels want. Zeros are added to the
hidden dimension and whole zero heads to attention. What changes numerically is RMSNorm alone, whose mean now runs over
more elements:  x / sqrt(sum(x^2)/H + eps) * w  =  x / sqrt(sum(x^2)/H' + eps*H/H') * (w * sqrt(H/H')).
"""

import dataclasses
import math
from collections.abc import Mapping

import torch

from nvfp4lab.errors import LabError


@dataclasses.dataclass(frozen=True)
class Widths:
    """The sizes that padding changes; `head_dim` stays. Elements, not bytes."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def rows(self) -> Mapping[str, int]:
        """Size of each named axis."""
        return {"hidden": self.hidden, "q": self.heads * self.head_dim, "kv": self.kv_heads * self.head_dim}


# Axis names of each weight [out, in]; None is an axis that keeps its size.
_AXES: Mapping[str, tuple[str | None, ...]] = {
    "embed_tokens": (None, "hidden"),
    "lm_head": (None, "hidden"),
    "q_proj": ("q", "hidden"),
    "k_proj": ("kv", "hidden"),
    "v_proj": ("kv", "hidden"),
    "o_proj": ("hidden", "q"),
    "gate_proj": (None, "hidden"),
    "up_proj": (None, "hidden"),
    "down_proj": ("hidden", None),
    "input_layernorm": ("hidden",),
    "post_attention_layernorm": ("hidden",),
    "norm": ("hidden",),
}


def pad_llama(tensors: Mapping[str, torch.Tensor], old: Widths, new: Widths) -> dict[str, torch.Tensor]:
    """Tensors of the widened model, same names and dtypes; the caller also sets eps to `padded_eps(eps, old, new)`.

    tensors: a Llama state dict, `model.layers.N.self_attn.q_proj.weight` [out, in] and so on, biases not supported.
    Exact in real arithmetic. Stored norm weights are rounded once more to their dtype; everything else is copied.
    Raises LabError when `new` is narrower or regroups query heads over KV heads (that would change the function).
    """
    if old.head_dim != new.head_dim or old.heads * new.kv_heads != new.heads * old.kv_heads:
        raise LabError(f"padding {old} to {new} would regroup heads; keep head_dim and the ratio heads:kv_heads")
    if any(new.rows[axis] < size for axis, size in old.rows.items()):
        raise LabError(f"padding cannot shrink {old} to {new}")
    return {name: _pad(name, tensor, old, new) for name, tensor in tensors.items()}


def padded_eps(eps: float, old: Widths, new: Widths) -> float:
    """RMSNorm's epsilon in the widened model."""
    return eps * old.hidden / new.hidden


def _pad(name: str, tensor: torch.Tensor, old: Widths, new: Widths) -> torch.Tensor:
    module = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if module not in _AXES or not name.endswith(".weight"):
        raise LabError(f"padding does not know the tensor {name!r} {list(tensor.shape)}")
    axes = _AXES[module]
    shape = [new.rows[axis] if axis else size for axis, size in zip(axes, tensor.shape, strict=True)]
    if "norm" in module:
        tensor = (tensor.double() * math.sqrt(old.hidden / new.hidden)).to(tensor.dtype)
    padded = tensor.new_zeros(shape)
    padded[tuple(slice(size) for size in tensor.shape)] = tensor
    return padded
