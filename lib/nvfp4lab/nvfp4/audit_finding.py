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

    ignore: names and globs of modules left in bf16. kv_fp8: whether an FP8 KV cache is asked for.
    """

    source: str | None
    quant_algo: str | None
    group_size: int | None
    ignore: tuple[str, ...]
    kv_fp8: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Settings":
        """Settings of a checkpoint; source None when neither file declares a ModelOpt quantisation."""
        if checkpoint.quant_config.get("quant_algo"):
            return from_config_json(checkpoint.quant_config)
        if checkpoint.hf_quant_config:
            return from_hf_quant_config(checkpoint.hf_quant_config)
        return cls(None, None, None, (), False)


def from_config_json(flat: Mapping[str, Any]) -> Settings:
    """Settings in `quantization_config` of config.json."""
    groups = flat.get("config_groups") or {}
    weights = next((group.get("weights") or {} for group in groups.values() if isinstance(group, Mapping)), {})
    scheme = flat.get("kv_cache_scheme") or flat.get("kv_cache_quant_algo")
    if isinstance(scheme, Mapping):
        kv_fp8 = scheme.get("num_bits") == 8 and scheme.get("type") == "float"
    else:
        kv_fp8 = str(scheme).upper() in ("FP8", "FLOAT8")
    size = flat.get("group_size", weights.get("group_size"))
    return Settings("config.json", flat.get("quant_algo"), size, tuple(map(str, flat.get("ignore") or ())), kv_fp8)


def from_hf_quant_config(nested: Mapping[str, Any]) -> Settings:
    """Settings in hf_quant_config.json."""
    quantization = nested.get("quantization")
    quantization = quantization if isinstance(quantization, Mapping) else {}
    return Settings(
        "hf_quant_config.json",
        quantization.get("quant_algo"),
        quantization.get("group_size"),
        tuple(map(str, quantization.get("exclude_modules") or ())),
        str(quantization.get("kv_cache_quant_algo")).upper() == "FP8",
    )
