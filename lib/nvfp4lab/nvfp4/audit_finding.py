"""What an audit says, and the settings that it judges a checkpoint by."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nvfp4lab.nvfp4.checkpoint import Checkpoint

EVERY_BACKEND = "every backend"
W4A4_BACKENDS = "every backend that quantises activations (all but marlin)"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One fault. tensor: the tensor, module, file or config entry; where: the file that holds it."""

    kind: str
    tensor: str
    what: str
    where: str
    hurts: str
    fix: str


@dataclasses.dataclass(frozen=True)
class Settings:
    """How the checkpoint says it is quantised, whichever of its two files says it; config.json wins, as in SGLang.

    source: the file; None without a declaration that this audit reads. method: "modelopt" or "compressed-tensors".
    ignore: names, globs and (compressed-tensors) `re:` patterns of modules left in bf16. kv_fp8: whether an FP8 KV cache
    with stored scales is asked for. targets: (name, pattern or class; algorithm) of `quantized_layers` or of `config_groups`,
    in order.
    """

    source: str | None
    quant_algo: str | None
    group_size: int | None
    ignore: tuple[str, ...]
    kv_fp8: bool
    method: str = "modelopt"
    targets: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Settings":
        """Settings of a checkpoint; source None when neither file declares a quantisation of the two methods."""
        declared = checkpoint.quant_config
        if declared.get("quant_algo"):
            return from_config_json(declared)
        if str(declared.get("quant_method")).replace("_", "-") == "compressed-tensors":
            return from_compressed_tensors(declared)
        if checkpoint.hf_quant_config:
            return from_hf_quant_config(checkpoint.hf_quant_config)
        return cls(None, None, None, (), False)


def from_config_json(flat: Mapping[str, Any]) -> Settings:
    """Settings in ModelOpt's `quantization_config` of config.json."""
    weights = next((group.get("weights") for group in _groups(flat) if isinstance(group.get("weights"), Mapping)), {})
    size = flat.get("group_size", weights.get("group_size"))
    ignore = flat.get("ignore", flat.get("exclude_modules"))
    targets = _layers(flat.get("quantized_layers"))
    return Settings("config.json", flat.get("quant_algo"), size, _names(ignore), _is_fp8_kv(flat), targets=targets)


def from_hf_quant_config(nested: Mapping[str, Any]) -> Settings:
    """Settings in hf_quant_config.json."""
    quantization = nested.get("quantization")
    quantization = quantization if isinstance(quantization, Mapping) else {}
    return Settings(
        "hf_quant_config.json",
        quantization.get("quant_algo"),
        quantization.get("group_size"),
        _names(quantization.get("exclude_modules")),
        _is_fp8_kv(quantization),
        targets=_layers(quantization.get("quantized_layers")),
    )


def from_compressed_tensors(flat: Mapping[str, Any]) -> Settings:
    """Settings in llm-compressor's `quantization_config`; quant_algo is that of its first NVFP4 group."""
    groups = [(group, _algorithm(group)) for group in _groups(flat)]
    targets = tuple((target, algorithm) for group, algorithm in groups for target in _names(group.get("targets")))
    fp4 = next(((group, algorithm) for group, algorithm in groups if "NVFP4" in algorithm), None)
    size = fp4[0]["weights"].get("group_size") if fp4 else None
    quant_algo = fp4[1] if fp4 else next((algorithm for _, algorithm in groups), None)
    return Settings("config.json", quant_algo, size, _names(flat.get("ignore")), _is_fp8_kv(flat), "compressed-tensors", targets)


def _algorithm(group: Mapping[str, Any]) -> str:
    """ModelOpt's name for what a config group asks for; a description of the weights for what has none."""
    weights = group.get("weights")
    weights = weights if isinstance(weights, Mapping) else {}
    kind, bits = weights.get("type"), weights.get("num_bits")
    if (kind, bits) == ("float", 4) and weights.get("strategy") in (None, "tensor_group"):
        return "NVFP4" if group.get("input_activations") else "W4A16_NVFP4"
    return "FP8" if (kind, bits) == ("float", 8) else f"{kind} of {bits} bits by {weights.get('strategy')}"


def _groups(flat: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = flat.get("config_groups")
    return [group for group in groups.values() if isinstance(group, Mapping)] if isinstance(groups, Mapping) else []


def _layers(listed: Any) -> tuple[tuple[str, str], ...]:
    """`quantized_layers`: name -> {"quant_algo": ...}."""
    if not isinstance(listed, Mapping):
        return ()
    return tuple(
        (name, str(entry["quant_algo"]).upper())
        for name, entry in listed.items()
        if isinstance(entry, Mapping) and entry.get("quant_algo")
    )


def _names(entries: Any) -> tuple[str, ...]:
    return tuple(map(str, entries)) if isinstance(entries, list | tuple) else ()


def _is_fp8_kv(declared: Mapping[str, Any]) -> bool:
    scheme = declared.get("kv_cache_scheme") or declared.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        return scheme.get("num_bits") == 8 and scheme.get("type") == "float" and not scheme.get("dynamic")
    return str(scheme).upper() in ("FP8", "FLOAT8")
