"""Do the sizes of all tensors, quantised or not, fit config.json, their neighbours and the same tensor of other layers?

Three views, from the surest to the weakest; what one has named, the next leaves alone:
    config.json: hidden size, vocabulary, experts, and heads where one head size holds for all layers;
    the layer itself: what gate and up write is what down reads, what q writes is what o reads;
    the other layers: a role (`layers.*.self_attn.k_proj.weight`) with one size everywhere but in a single layer. Models whose
    layers differ on purpose differ in more than one.
"""

import collections
import dataclasses
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from nvfp4lab.nvfp4.audit_finding import EVERY_BACKEND, Finding
from nvfp4lab.nvfp4.checkpoint import Checkpoint
from nvfp4lab.nvfp4.checkpoint_modules import EXPERT_COUNT_NAMES, LayerKind, Module, kind_of

_READ_HIDDEN = (
    *("q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "lm_head", "embed_tokens"),
    *("q_a_proj", "kv_a_proj_with_mqa", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"),
)
_WRITE_HIDDEN = ("o_proj", "out_proj", "down_proj", "w2")
_NORMS = (
    *(".input_layernorm", ".post_attention_layernorm", ".pre_feedforward_layernorm", ".post_feedforward_layernorm"),
    *("model.norm", "language_model.norm"),
)
_LAYER = re.compile(r"(?<=layers\.)\d+(?=\.)")
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


Sizes = Iterator[tuple[str, str]]  # (tensor, why its size is wrong)


def findings(checkpoint: Checkpoint, modules: Mapping[str, Module], flagged: Container[str]) -> Iterator[Finding]:
    """One finding for each module whose size fits nothing; flagged: names of tensors that are known to be wrong already."""
    owner = {info.name: module.path for module in modules.values() for info in module.tensors.values()}
    weights = _Weights.of(checkpoint, modules)
    named = {owner.get(name, name) for name in checkpoint.tensors if name in flagged}
    for name, why in (*_against_config(weights), *_within_layers(weights), *_against_other_layers(checkpoint, weights)):
        who = owner.get(name, name)
        if who not in named:
            named.add(who)
            info = checkpoint.tensors[name]
            what = f"{list(info.shape)}: {why}"
            yield Finding("wrong_shape", name, what, info.file.name, EVERY_BACKEND, "export the checkpoint again")


@dataclasses.dataclass(frozen=True)
class _Weights:
    """Every vector and matrix named `.weight`, by path.

    shapes: those that it multiplies with: a packed one has twice as many columns as bytes. roles: how often each shape
    occurs in each role.
    """

    config: Mapping[str, Any]
    names: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    roles: Mapping[str, Mapping[tuple[int, ...], int]]

    @classmethod
    def of(cls, checkpoint: Checkpoint, modules: Mapping[str, Module]) -> "_Weights":
        packed = {module.tensors["weight"].name for module in modules.values() if module.weight_is_packed}
        names, shapes = {}, {}
        roles: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
        for name, info in checkpoint.tensors.items():
            if name.endswith((".weight", ".weight_packed")) and len(info.shape) in (1, 2):
                path = name.rpartition(".")[0]
                names[path] = name
                shapes[path] = (*info.shape[:-1], info.shape[-1] * 2) if name in packed else info.shape
                roles[role_of(path)][shapes[path]] += 1
        return cls(checkpoint.text_config, names, shapes, roles)

    def side(self, parent: str, leaf: str, is_input: bool = False) -> int | None:
        """Rows, or columns for an input, of a projection; None where it is not there or no matrix."""
        shape = self.shapes.get(f"{parent}.{leaf}", ())
        return shape[is_input] if len(shape) == 2 else None

    def rarest(self, parent: str, leaves: Iterable[str]) -> str:
        """Of several that do not fit together, the one whose size is rarest in its role: its name."""
        paths = [f"{parent}.{leaf}" for leaf in leaves]
        return self.names[min(paths, key=lambda path: self.roles[role_of(path)][self.shapes[path]])]


def role_of(name: str) -> str:
    """`name` for any layer and any expert."""
    return _EXPERT.sub("*", _LAYER.sub("*", name))


def _against_config(weights: _Weights) -> Sizes:
    """What config.json contradicts."""
    heads, layers = _head_sizes(weights.config), weights.config.get("num_hidden_layers")
    for path, shape in weights.shapes.items():
        kind, leaf = kind_of(path, layers), path.rpartition(".")[2]
        if kind in (LayerKind.VISION, LayerKind.MTP):  # an MTP layer's projections may read two hidden states at once
            continue
        why = _unlike_hidden(weights.config, path, leaf, kind, shape)
        if not why and ".self_attn." in path and leaf in heads and len(shape) == 2 and shape[leaf == "o_proj"] not in heads[leaf]:
            why = f"config.json gives it {' or '.join(map(str, heads[leaf]))} {'columns' if leaf == 'o_proj' else 'rows'}"
        if why:
            yield weights.names[path], why


def _unlike_hidden(config: Mapping[str, Any], path: str, leaf: str, kind: LayerKind, shape: tuple[int, ...]) -> str:
    """Why a weight does not fit hidden size, vocabulary or number of experts; "" if it does."""
    hidden = (config.get("moe_latent_size") if kind is LayerKind.ROUTED_EXPERT else None) or config.get("hidden_size")
    if not isinstance(hidden, int):
        return ""
    told = f"config.json has hidden_size {hidden}"
    if len(shape) == 1:
        return told if path.endswith(_NORMS) and shape != (hidden,) else ""
    if kind is LayerKind.ROUTER:
        return _unlike_router(config, hidden, leaf, shape)
    if leaf in _READ_HIDDEN and shape[1] != hidden:
        return f"{told}, this reads {shape[1]}"
    if leaf in _WRITE_HIDDEN and shape[0] != hidden:
        return f"{told}, this writes {shape[0]}"
    vocabulary = config.get("vocab_size")
    wrong = leaf in ("lm_head", "embed_tokens") and isinstance(vocabulary, int) and shape[0] != vocabulary
    return f"config.json has vocab_size {vocabulary}" if wrong else ""


def _unlike_router(config: Mapping[str, Any], hidden: int, leaf: str, shape: tuple[int, ...]) -> str:
    experts = next((config[name] for name in EXPERT_COUNT_NAMES if config.get(name)), None)
    if leaf == "shared_expert_gate" or not isinstance(experts, int) or "zero_expert_num" in config:
        return ""
    return "" if sorted(shape) == sorted((experts, hidden)) else f"config.json has {experts} experts and hidden_size {hidden}"


def _head_sizes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Projection -> rows (o_proj: columns) that it may have; {} where layers have heads of several sizes."""
    names = ("num_attention_heads", "num_key_value_heads", "head_dim")
    others = [name for name in config if name.endswith(("head_dim", "attention_heads", "key_value_heads")) and name not in names]
    if any(not name.startswith("linear_") for name in others) or {"block_configs", "attention_other_setting"} & config.keys():
        return {}
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(hidden, int) or not heads:
        return {}
    size = config.get("head_dim") or hidden // heads
    query, key = heads * size, (config.get("num_key_value_heads") or heads) * size
    rows = {"q_proj": (query, 2 * query), "k_proj": (key,), "v_proj": (key,)}  # twice: an output gate beside the query
    return rows | {"o_proj": (query,), "qkv_proj": (query + 2 * key, 2 * query + 2 * key)}


def _within_layers(weights: _Weights) -> Sizes:
    """Projections that do not fit those beside them."""
    for parent in {path.rpartition(".")[0]: None for path in weights.shapes}:
        for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
            sides = {leaf: weights.side(parent, leaf, is_input=leaf == down) for leaf in (gate, up, down)}
            yield from _odd_one(weights, parent, {leaf: size for leaf, size in sides.items() if size})
        fused, down = weights.side(parent, "gate_up_proj"), weights.side(parent, "down_proj", is_input=True)
        if fused and down and fused != 2 * down:
            yield weights.rarest(parent, ("gate_up_proj", "down_proj")), f"gate and up have {fused} rows, down reads {down}"
        if parent.endswith("self_attn") and "v_head_dim" not in weights.config:
            yield from _attention(weights, parent)


def _odd_one(weights: _Weights, parent: str, sizes: Mapping[str, int]) -> Sizes:
    """gate and up write what down reads."""
    if len(set(sizes.values())) > 1:
        usual, often = collections.Counter(sizes.values()).most_common(1)[0]
        odd = [leaf for leaf, size in sizes.items() if size != usual or often == 1]
        yield weights.rarest(parent, odd), "gate and up must write what down reads: " + ", ".join(map(str, sizes.values()))


def _attention(weights: _Weights, parent: str) -> Sizes:
    key, value, query = (weights.side(parent, leaf) for leaf in ("k_proj", "v_proj", "q_proj"))
    output = weights.side(parent, "o_proj", is_input=True)
    if key and value and key != value:
        yield weights.rarest(parent, ("k_proj", "v_proj")), f"k_proj has {key} rows, v_proj {value}"
    if query and output and query not in (output, 2 * output):
        yield weights.rarest(parent, ("q_proj", "o_proj")), f"q_proj has {query} rows, o_proj reads {output}"


def _against_other_layers(checkpoint: Checkpoint, weights: _Weights) -> Sizes:
    """Where one layer alone differs from all others, of which there are at least two; any tensor with a layer in its name."""
    places: dict[str, dict[tuple[int, ...], dict[str, list[str]]]] = {}
    for name, info in checkpoint.tensors.items():
        if layer := _LAYER.search(name):
            path = name.rpartition(".")[0]
            is_weight = weights.names.get(path) == name
            # Scales of different formats are different roles; a weight is compared whatever its format.
            scale = f"{role_of(name)} {info.dtype}", info.shape or (1,)
            role, shape = (role_of(path), weights.shapes[path]) if is_weight else scale
            places.setdefault(role, {}).setdefault(shape, {}).setdefault(layer[0], []).append(name)
    for shapes in places.values():
        if len(shapes) == 2:
            (_, at), (usual, elsewhere) = sorted(shapes.items(), key=lambda item: len(item[1]))
            if len(at) == 1 and len(elsewhere.keys() - at.keys()) >= 2:
                yield from ((name, f"every other layer has {list(usual)}") for name in next(iter(at.values())))
