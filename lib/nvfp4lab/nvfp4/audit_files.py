"""Are all files whole, and is everything in them that the config promises?"""

import collections
import re
from collections.abc import Iterator, Mapping

from nvfp4lab.nvfp4.audit_finding import EVERY_BACKEND, Finding
from nvfp4lab.nvfp4.checkpoint import Checkpoint, Defect
from nvfp4lab.nvfp4.checkpoint_modules import EXPERT_COUNT_NAMES, LayerKind, Module, kind_of

_IN_LAYER = re.compile(r"^(?P<stack>(?:.+\.)?layers)\.(?P<layer>\d+)\.(?P<rest>.+)$")
_WRITERS = ("ForCausalLM", "ForConditionalGeneration")  # architectures with a head over the vocabulary
_FIX = {
    "shard_missing": "download or copy this file again",
    "shard_truncated": "download or copy this file again; its size is wrong",
    "header_malformed": "download this file again; if it stays so, export the checkpoint again",
    "config_malformed": "download this file again",
    "tensor_missing": "export the checkpoint again; a server leaves what it does not find as it was allocated",
    "tensor_duplicated": "export the checkpoint again, or remove the stale shard; which copy wins depends on the load order",
}


def findings(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[Finding]:
    """Defects of the files; where every header could be read, also layers and experts that are not there."""
    for defect in checkpoint.defects:
        file = checkpoint.tensors[defect.name].file.name if defect.name in checkpoint.tensors else defect.name
        yield _finding(defect, file)
    if not checkpoint.is_partial:
        known = {defect.name for defect in checkpoint.defects}
        absent = [*_absent(checkpoint, modules), *_absent_parts(checkpoint), *_absent_ends(checkpoint)]
        yield from (_finding(defect, "") for defect in absent if not known & {defect.name, f"{defect.name}.weight"})


def _finding(defect: Defect, where: str) -> Finding:
    return Finding(defect.kind, defect.name, defect.what, where, EVERY_BACKEND, _FIX[defect.kind])


def _absent(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[Defect]:
    declared = checkpoint.text_config.get("num_hidden_layers")
    present = {int(found[1]) for path in checkpoint.tensors if (found := re.search(r"(?:^|\.)layers\.(\d+)\.", path))}
    for layer in sorted(set(range(declared or 0)) - present):
        what = f"config.json declares {declared} layers, and nothing of this one is stored"
        yield Defect("tensor_missing", f"layers.{layer}", what)
    yield from _absent_experts(checkpoint, modules)
    for module in modules.values():
        if module.is_fp4 and "weight" not in module.tensors:
            yield Defect("tensor_missing", f"{module.path}.weight", "its scales are stored, the weight is not")


def _absent_experts(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[Defect]:
    declared = next((checkpoint.text_config[name] for name in EXPERT_COUNT_NAMES if checkpoint.text_config.get(name)), None)
    leaves: dict[str, dict[int, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    for module in modules.values():
        if module.expert is not None and module.kind is not LayerKind.VISION:
            leaves[module.block][module.expert].add(module.leaf)
    for block, experts in leaves.items():
        whole = set().union(*experts.values())
        for expert in range(max(declared or 0, max(experts) + 1)):
            for leaf in sorted(whole - experts.get(expert, set())):
                yield Defect("tensor_missing", f"{block}.{expert}.{leaf}", "other experts of this layer have it")


def _absent_parts(checkpoint: Checkpoint) -> Iterator[Defect]:
    """What a single layer lacks of what all others have there, at least two, and it has nothing else in its place.

    Models whose layers differ on purpose differ in more than one layer, or have another part instead (a first dense layer).
    """
    if "block_configs" in checkpoint.text_config:  # Nemotron's search leaves parts out, perhaps once
        return
    parts: dict[tuple[str, str], dict[int, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
    declared = checkpoint.text_config.get("num_hidden_layers")
    for name in checkpoint.tensors:
        found = _IN_LAYER.match(name)
        if found and (declared is None or int(found["layer"]) < declared):
            layer, (part, *inside) = int(found["layer"]), found["rest"].split(".")
            parts[found["stack"], ""][layer].add(part)
            if inside:
                parts[found["stack"], f"{part}."][layer].add(inside[0])
    for (stack, parent), by_layer in parts.items():
        often = collections.Counter(map(frozenset, by_layer.values())).most_common()
        if len(often) == 2 and often[1][1] == 1 < often[0][1] and often[1][0] < often[0][0]:
            layer = next(number for number, found in by_layer.items() if found == often[1][0])
            for part in sorted(often[0][0] - often[1][0]):
                yield Defect("tensor_missing", f"{stack}.{layer}.{parent}{part}", "every other layer has it")


def _absent_ends(checkpoint: Checkpoint) -> Iterator[Defect]:
    """The embedding, last norm or head of a language model in the naming of Llama; an index would have named them.

    Told only where one of embedding and norm stands beside all declared layers and nothing else does: other families have
    other names there (`final_layernorm`, `word_embeddings`, `hidden_norm` of a draft model), and silence is the lesser fault.
    Not of a single layer, which is a draft model and takes the ends of the model that it drafts for.
    """
    declared = checkpoint.text_config.get("num_hidden_layers") or 0
    stacks: dict[str, set[str]] = collections.defaultdict(set)
    has_norms = False
    for name in checkpoint.tensors:
        if (found := _IN_LAYER.match(name)) and kind_of(found["stack"], None) not in (LayerKind.VISION, LayerKind.MTP):
            stacks[found["stack"].removesuffix("layers")].add(found["layer"])
            has_norms |= name.endswith("norm.weight")  # without weights in them the last one has none either
    whole = sorted(stack for stack, layers in stacks.items() if len(layers) >= declared > 1)
    beside = {stack: _beside_layers(checkpoint, stack) for stack in whole}
    for stack, names in beside.items():
        if names in ({"embed_tokens"}, {"norm"}) and has_norms:
            (absent,) = {"embed_tokens", "norm"} - names
            yield Defect("tensor_missing", f"{stack}{absent}.weight", "the other end of its stack of layers is stored")
    writes = any(str(name).endswith(_WRITERS) for name in checkpoint.config.get("architectures") or ())
    tied = {config.get("tie_word_embeddings") for config in (checkpoint.config, checkpoint.text_config)} - {None}
    is_llama = any(stack.endswith("model.") and "embed_tokens" in names for stack, names in beside.items())
    if writes and is_llama and tied == {False} and not any("lm_head." in name for name in checkpoint.tensors):
        yield Defect("tensor_missing", "lm_head.weight", "config.json does not tie it to the embedding, and no head is stored")


def _beside_layers(checkpoint: Checkpoint, stack: str) -> set[str]:
    """Modules that stand beside a stack of layers: "embed_tokens" of `model.embed_tokens.weight` for `model.`."""
    rest = (name.removeprefix(stack).split(".") for name in checkpoint.tensors if name.startswith(stack))
    return {parts[0] for parts in rest if len(parts) == 2}
