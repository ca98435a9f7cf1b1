"""Are there scales for an FP8 KV cache that is declared, one for K and one for V of each layer, and are they numbers?

What SGLang makes of others: srt/layers/quantization/kv_cache.py, process_weights_after_loading, alike in 0.5.17 and 0.5.23.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

from nvfp4lab.nvfp4.audit_finding import Finding, Settings
from nvfp4lab.nvfp4.audit_scales import is_small_float
from nvfp4lab.nvfp4.checkpoint import Checkpoint, TensorInfo
from nvfp4lab.nvfp4.checkpoint_modules import LayerKind, kind_of

_ENDINGS: Mapping[str, tuple[str, ...]] = {
    "k": (".k_scale", ".kv_scale", ".k_proj.output_scale"),
    "v": (".v_scale", ".kv_scale", ".v_proj.output_scale"),
}
_HURTS = "attention, every backend with --kv-cache-dtype fp8_e4m3 or auto"
_FIX = "calibrate KV scales, or declare no KV quantisation"
_LATENT = ".kv_b_proj."  # MLA caches one latent vector for both, so one scale


def to_read(checkpoint: Checkpoint, settings: Settings) -> list[TensorInfo]:
    """The scale tensors of the KV cache; none where no FP8 cache with stored scales is declared."""
    stored = [info for parts in _by_layer(checkpoint).values() for _, info in parts] if settings.kv_fp8 else []
    return [info for info in stored if is_small_float(info)]


def findings(checkpoint: Checkpoint, settings: Settings, values: Mapping[str, Sequence[float]]) -> Iterator[Finding]:
    """Layers without both scales (unless the checkpoint is partial), and scales that are no positive number."""
    if not settings.kv_fp8:
        return
    layers = _by_layer(checkpoint)
    latent = {name.partition(".self_attn.")[0] for name in checkpoint.tensors if _LATENT in name}
    for layer, parts in sorted(layers.items()):
        stored = {part for part, _ in parts}
        if not checkpoint.is_partial and (what := _what_is_missing(stored, layer in latent)):
            yield Finding("kv_scale_missing", f"{layer}.self_attn", what, str(settings.source), _HURTS, _FIX)
        for info in dict.fromkeys(info for _, info in parts):
            bad = next((value for value in values.get(info.name, ()) if not math.isfinite(value) or value <= 0), None)
            if bad is not None:
                kind = "kv_scale_zero" if math.isfinite(bad) else "kv_scale_nonfinite"
                what = f"holds {bad}; the server raises on it, multiplies by it, or takes 1.0 or its partner instead"
                yield Finding(kind, info.name, what, info.file.name, _HURTS, _FIX)


def _by_layer(checkpoint: Checkpoint) -> dict[str, list[tuple[str, TensorInfo]]]:
    """Layer -> ("k" or "v", scale), for every layer with attention but a vision tower's, which has no cache."""
    layers: dict[str, list[tuple[str, TensorInfo]]] = {}
    for name, info in checkpoint.tensors.items():
        layer, attention, _ = name.partition(".self_attn.")
        if attention and kind_of(layer, None) is not LayerKind.VISION:
            found = layers.setdefault(layer, [])
            found += [(part, info) for part, endings in _ENDINGS.items() if name.endswith(endings)]
    return layers


def _what_is_missing(stored: set[str], is_latent: bool) -> str:
    if not stored:
        return "an FP8 KV cache is declared, but this layer stores no k_scale and v_scale; servers use 1.0 and clip"
    if stored == {"v"}:
        return "v_scale is stored without k_scale; SGLang raises an AssertionError"
    return "k_scale is stored without v_scale; SGLang uses it for V as well" if stored == {"k"} and not is_latent else ""
