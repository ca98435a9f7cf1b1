"""From tensor names to modules: which Linear, of which kind, fused with which others by the server, excluded or not.

Module paths are the checkpoint's own. The exclusion rule is SGLang's, as its `ModelOptQuantConfig` reads an ignore
list (srt/layers/quantization/modelopt_quant.py and quantization/utils.py, alike in 0.5.17 and 0.5.23):
    a glob must match the whole path of the *served* (fused) module, or one dotted part of it;
    a plain name matches the module itself or anything below it, tried on every shard of a fused module;
    the routed experts are one served module, `...experts`, for which only the glob rule counts.
"""

import dataclasses
import enum
import functools
import re
from collections.abc import Container, Iterable, Mapping, Sequence

from nvfp4lab.nvfp4.checkpoint import TensorInfo


class LayerKind(enum.StrEnum):
    """What a quantisable module is, as far as backend flags care."""

    DENSE = "dense"
    SHARED_EXPERT = "shared expert"
    ROUTED_EXPERT = "routed expert"
    MTP = "MTP"
    LM_HEAD = "lm_head"
    ROUTER = "router"
    VISION = "vision"


SCALE_LEAVES = ("weight_scale_2", "weight_scale", "input_scale")
# compressed-tensors' names for the same; its global scales are the reciprocals, which no rule here minds.
_ALIASES = {"weight_global_scale": "weight_scale_2", "input_global_scale": "input_scale"}
EXPERT_COUNT_NAMES = ("num_experts", "n_routed_experts", "num_local_experts")  # in config.json, by family
_FP8 = ("F8_E4M3", "F8_E5M2")
# Served module -> its shards in the checkpoint; SGLang's load_weights of Llama, Qwen, Mixtral, DeepSeek and Qwen3.5.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj_with_mqa": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}
_GATE_UP = (("gate_proj", "up_proj"), ("w1", "w3"))
_SINGLE = ("o_proj", "down_proj", "out_proj", "q_proj", "q_b_proj", "kv_b_proj", "w1", "w2", "w3", "eh_proj", "lm_head")
_SERVED_OF = {shard: served for served, shards in FUSED.items() for shard in shards}
LINEAR_LEAVES = frozenset((*FUSED, *_SERVED_OF, *_SINGLE))
_STACKED = ("gate_up_proj", "down_proj", "w13", "w2")
_TAIL_IS_ENOUGH = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj")  # SGLang's `fused_patterns`
_EXPERT = re.compile(r"^(?P<block>.+\.experts)(?:\.(?P<expert>\d+))?(?:\.(?P<leaf>.+))?$")
_SCALE = re.compile(rf"^(?P<module>.+)[._](?P<leaf>{'|'.join((*SCALE_LEAVES, *_ALIASES))})$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclasses.dataclass(frozen=True)
class Module:
    """One Linear (or one 3-D stack of experts) and its tensors by leaf: weight, weight_scale, weight_scale_2, input_scale."""

    path: str
    kind: LayerKind
    tensors: Mapping[str, TensorInfo]

    @property
    def is_fp4(self) -> bool:
        """Whether any NVFP4 scale, or a packed weight, is stored for it."""
        return not self.is_fp8 and (any(leaf in self.tensors for leaf in SCALE_LEAVES) or self.weight_is_packed)

    @property
    def is_fp8(self) -> bool:
        """Whether the weight is stored in FP8, as some layers of a mixed checkpoint; a global scale would make it a broken FP4."""
        return "weight_scale_2" not in self.tensors and "weight" in self.tensors and self.tensors["weight"].dtype in _FP8

    @property
    def is_quantised(self) -> bool:
        return self.is_fp4 or self.is_fp8

    @property
    def stored_as(self) -> str:
        """ "FP4", "FP8" or "bf16" (which stands for any float of 16 bits or more)."""
        return "FP4" if self.is_fp4 else "FP8" if self.is_fp8 else "bf16"

    @property
    def weight_is_packed(self) -> bool:
        """Whether the weight is stored as bytes (two FP4 codes each)."""
        return "weight" in self.tensors and self.tensors["weight"].dtype == "U8"

    @property
    def info(self) -> TensorInfo:
        """The weight, or what there is without one."""
        return self.tensors.get("weight") or next(iter(self.tensors.values()))

    @property
    def leaf(self) -> str:
        """Last part of the path: "q_proj"."""
        return self.path.rsplit(".", 1)[-1]

    @property
    def block(self) -> str:
        """Path of everything that one server module loads: `...mlp.experts` for a routed expert, else the parent."""
        found = _EXPERT.match(self.path)
        return found["block"] if found else self.path.rpartition(".")[0]

    @property
    def is_routed(self) -> bool:
        """Whether it belongs to routed experts, those of an MTP layer included."""
        return _EXPERT.match(self.path) is not None

    @property
    def expert(self) -> int | None:
        """Number of the routed expert, None for anything else and for 3-D stacks."""
        found = _EXPERT.match(self.path)
        return int(found["expert"]) if found and found["expert"] else None


def modules_of(tensors: Mapping[str, TensorInfo], layers: int | None) -> dict[str, Module]:
    """All Linear-like modules by path. layers: `num_hidden_layers`; decoder layers beyond it are MTP layers (DeepSeek)."""
    parts: dict[str, dict[str, TensorInfo]] = {}
    scaled = {match["module"] for name in tensors if (match := _SCALE.match(name))}
    for name, info in sorted(tensors.items()):
        match = _SCALE.match(name)
        if match:
            parts.setdefault(match["module"], {})[_ALIASES.get(match["leaf"], match["leaf"])] = info
        elif name.endswith(".weight_packed"):
            parts.setdefault(name.removesuffix(".weight_packed"), {})["weight"] = info
        elif name.endswith(".weight"):
            path = name.removesuffix(".weight")
            if path in scaled or path.rsplit(".", 1)[-1] in LINEAR_LEAVES or info.dtype in ("U8", "I8"):
                parts.setdefault(path, {})["weight"] = info
        elif name in scaled or (_EXPERT.match(name) and name.rsplit(".", 1)[-1] in _STACKED):
            parts.setdefault(name, {})["weight"] = info  # a 3-D parameter of all experts has no `.weight`
    return {path: Module(path, kind_of(path, layers), leaves) for path, leaves in parts.items()}


@functools.cache
def kind_of(path: str, layers: int | None) -> LayerKind:
    """Kind of the module at `path`. MTP wins over what the module is inside the MTP layer."""
    layer = _LAYER.search(path)
    names = path.split(".")
    if any(re.match(r"mtp|nextn", name) for name in names) or (layer and layers is not None and int(layer[1]) >= layers):
        return LayerKind.MTP
    if any(name.startswith(("visual", "vision", "audio", "image")) for name in names):
        return LayerKind.VISION
    if names[-1] == "lm_head":
        return LayerKind.LM_HEAD
    if names[-1] in ("gate", "router", "shared_expert_gate"):
        return LayerKind.ROUTER
    if "shared_expert" in names or "shared_experts" in names:
        return LayerKind.SHARED_EXPERT
    return LayerKind.ROUTED_EXPERT if "experts" in names else LayerKind.DENSE


def shares_one_scale(module: Module) -> tuple[str, ...]:
    """Paths of the modules whose global scale a server merges with this one's, itself included, gate before up."""
    parent = module.path.rpartition(".")[0]
    groups = _GATE_UP if "experts" in module.path.split(".") else tuple(FUSED.values()) + _GATE_UP
    group = next((group for group in groups if module.leaf in group), (module.leaf,))
    return tuple(f"{parent}.{leaf}" if parent else leaf for leaf in group)


def served_module(module: Module, known: Container[str]) -> tuple[str, tuple[str, ...]]:
    """(path under which the server asks whether it is excluded, paths of the shards it is loaded from).

    known: all module paths of the checkpoint; MLA's lone `q_proj` is not fused with anything.
    """
    if module.is_routed:
        return module.block, ()
    parent = module.path.rpartition(".")[0]
    prefix = f"{parent}." if parent else ""
    served = _SERVED_OF.get(module.leaf, module.leaf)
    shards = tuple(f"{prefix}{shard}" for shard in FUSED.get(served, ()))
    if module.leaf in _SERVED_OF and not all(shard in known for shard in shards):
        return module.path, (module.path,)
    return f"{prefix}{served}", shards or (module.path,)


def is_excluded(served: str, shards: Sequence[str], is_routed: bool, patterns: Iterable[str]) -> bool | None:
    """Whether SGLang leaves the served module unquantised; None when only some shards are listed, where it raises."""
    patterns = tuple(patterns)
    by_shard = [not is_routed and any(names_path(pattern, path) for pattern in patterns) for path in shards]
    if any(by_shard) and not all(by_shard):
        return None  # before any glob is looked at
    return any(by_shard) or any(glob_matches(pattern, served) for pattern in patterns)


def glob_matches(pattern: str, path: str) -> bool:
    """SGLang's `is_layer_excluded` for one entry."""
    regex = _compiled(pattern)
    tail = pattern.rsplit(".", 1)[-1]
    by_tail = tail in _TAIL_IS_ENOUGH and tail in path.rsplit(".", 1)[-1]
    return bool(by_tail or regex.fullmatch(path) or any(regex.fullmatch(part) for part in path.split(".")))


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(".*".join(re.escape(piece) for piece in pattern.split("*")))


def names_path(name: str, path: str) -> bool:
    """Whether a plain entry is `path`, a parent of it, or a run of whole dotted parts inside it."""
    return f".{name.rstrip('.')}." in f".{path}."
