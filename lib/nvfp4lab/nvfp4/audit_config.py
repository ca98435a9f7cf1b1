"""Does the config say what the files hold: which modules are FP4, lm_head and router left alone, W13 order?"""

import collections
import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

from nvfp4lab.nvfp4.audit_finding import EVERY_BACKEND, Finding, Settings, from_config_json, from_hf_quant_config
from nvfp4lab.nvfp4.audit_rules import Ruling, Served, rulings, unreadable_patterns, with_prefixes
from nvfp4lab.nvfp4.checkpoint import Checkpoint
from nvfp4lab.nvfp4.checkpoint_modules import LayerKind, Module, is_excluded

NVFP4_ALGORITHMS = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MIXED_PRECISION")
_MAY_BE_ABSENT = ("lm_head", "mtp", "nextn", "visual", "vision", "audio", "embed")  # parts that an export may leave out
_UP_FIRST = ("up_gate_proj", "w31")


def findings(
    checkpoint: Checkpoint, settings: Settings, modules: Mapping[str, Module], units: Sequence[tuple[Served, Ruling]]
) -> Iterator[Finding]:
    """Every disagreement between config.json, hf_quant_config.json and the tensors."""
    yield from _declaration(checkpoint, settings, modules)
    yield from _must_stay_unquantised(modules)
    yield from _w13_order(checkpoint, modules)
    if settings.source is None:
        return
    if settings.quant_algo in NVFP4_ALGORITHMS and (settings.targets or settings.quant_algo != "MIXED_PRECISION"):
        yield from (finding for unit, rule in units if (finding := _disagreement(unit, rule, settings)))
        if not checkpoint.is_partial:
            yield from _unmatched_entries(checkpoint, settings, [unit for unit, _ in units])


def _declaration(checkpoint: Checkpoint, settings: Settings, modules: Mapping[str, Module]) -> Iterator[Finding]:
    first_fp4 = next((module.path for module in modules.values() if module.is_fp4), None)
    if settings.source is None:
        if first_fp4 and not checkpoint.quant_config:
            what = "FP4 tensors are stored, but neither config.json nor hf_quant_config.json declares a quantisation"
            yield _config_finding(
                "quantisation_undeclared", first_fp4, what, "config.json", "add hf_quant_config.json of the export"
            )
        return
    is_modelopt = settings.method == "modelopt"
    if settings.quant_algo not in NVFP4_ALGORITHMS and first_fp4:
        declared = "quant_algo" if is_modelopt else "what config_groups declare"
        what = f"{declared} is {settings.quant_algo!r}, the stored layers are NVFP4"
        fix = 'set "quant_algo": "NVFP4"' if is_modelopt else "give the group float weights of 4 bits by tensor_group of 16"
        yield _config_finding("config_invalid", "quant_algo" if is_modelopt else "config_groups", what, settings.source, fix)
    if settings.quant_algo == "MIXED_PRECISION" and not settings.targets:
        what = "MIXED_PRECISION without quantized_layers; SGLang raises"
        yield _config_finding("config_invalid", "quantized_layers", what, settings.source, "list every quantised module there")
    for entry, why in unreadable_patterns(settings):
        what = f"{why}; SGLang raises when it compiles this pattern"
        yield _config_finding("config_invalid", entry, what, settings.source, "correct the regular expression")
    is_needed = settings.source == "hf_quant_config.json" and settings.quant_algo != "MIXED_PRECISION" and first_fp4
    if settings.group_size not in (None, 16) or (settings.group_size is None and is_needed):
        what = f"group_size is {settings.group_size}; NVFP4 blocks are 16 long"
        yield _config_finding("config_invalid", "group_size", what, settings.source, 'set "group_size": 16')
    if checkpoint.hf_quant_config and checkpoint.quant_config.get("quant_algo"):
        ours, theirs = from_config_json(checkpoint.quant_config), from_hf_quant_config(checkpoint.hf_quant_config)
        for name in ("quant_algo", "ignore", "targets", "kv_fp8"):
            if _comparable(getattr(ours, name)) != _comparable(getattr(theirs, name)):
                what = f"config.json and hf_quant_config.json disagree on {name}"
                fix = "make them equal; SGLang reads config.json first, other tools the other"
                yield _config_finding("config_disagrees", name, what, "hf_quant_config.json", fix)


def _comparable(value):
    return set(value) if isinstance(value, tuple) else value


def _config_finding(kind: str, tensor: str, what: str, where: str, fix: str) -> Finding:
    return Finding(kind, tensor, what, where, EVERY_BACKEND, fix)


def _must_stay_unquantised(modules: Mapping[str, Module]) -> Iterator[Finding]:
    for module in modules.values():
        # An FP8 lm_head may be declared, and the lists judge it; a router is built without quantisation whatever they say.
        if (module.is_fp4 and module.kind is LayerKind.LM_HEAD) or (module.is_quantised and module.kind is LayerKind.ROUTER):
            name = "lm_head" if module.kind is LayerKind.LM_HEAD else "router"
            what = f"the {name} is stored in {module.stored_as}; servers build it unquantised, and its error reaches every token"
            yield _module_finding(f"{name}_quantised", module, what, f"export again with the {name} excluded")


def _w13_order(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Iterator[Finding]:
    hurts = "moe: every runner that is told [gate, up]; flashinfer_cutlass and flashinfer_cutedsl swap the halves once more"
    fix = "store gate_proj and up_proj apart, or gate before up"
    if checkpoint.text_config.get("inference_moe_w13_interleaved"):
        what = "config.json says that gate and up rows are interleaved; only SGLang's Inkling loader undoes that"
        yield Finding("w13_order", "inference_moe_w13_interleaved", what, "config.json", hurts, fix)
    for module in modules.values():
        if any(leaf in _UP_FIRST for leaf in module.path.split(".")[-2:]):
            what = "the fused projection is named up before gate; servers load fused halves as [gate, up]"
            yield dataclasses.replace(_module_finding("w13_order", module, what, fix), hurts=hurts)


def _disagreement(unit: Served, rule: Ruling, settings: Settings) -> Finding | None:
    """The finding for one served module, if what the server will expect is not what is stored."""
    first = unit.stored[0]
    if first.kind is LayerKind.LM_HEAD and "FP4" in unit.formats:
        return None  # reported as lm_head_quantised
    if len(unit.formats) > 1:
        rarest = min(unit.formats, key=lambda form: sum(module.stored_as == form for module in unit.stored))
        odd = next(module for module in unit.stored if module.stored_as == rarest)
        other = next(module for module in unit.stored if module.stored_as != rarest)
        what = (
            f"{unit.path} is one layer for the server, but {odd.path} is stored in {rarest} and {other.path} in {other.stored_as}"
        )
        return _of_list("fused_mixed", odd, what, "quantise all of its parts alike, or none")
    if rule.raises:
        return _of_list(f"{_LISTS[rule.by]}_mismatch", first, f"{rule.raises}; SGLang raises", _FIX_RAISES[rule.by])
    (stored,) = unit.formats
    if rule.expects in (None, stored):
        return None
    return _of_list(f"{_LISTS[rule.by]}_mismatch", first, *_what_and_fix(unit, rule, stored, settings))


_LISTS = {"ignore": "ignore", "targets": "target"}
_FIX_RAISES = {
    "ignore": "list all shards of the fused layer, or none",
    "targets": "give all parts of the layer one target, or add them to the ignore list",
}


def _what_and_fix(unit: Served, rule: Ruling, stored: str, settings: Settings) -> tuple[str, str]:
    entry = f"{unit.path}*" if unit.is_routed and settings.method == "modelopt" else unit.path
    name = "quantized_layers" if settings.method == "modelopt" else "config_groups"
    if rule.by == "targets":
        told = f"gives it {rule.algorithm}" if rule.algorithm else "does not list it"
        what = f"stored in {stored}, but {name} of {settings.source} {told} under the served name {unit.path}"
        return what, f"correct its entry in {name}" if rule.algorithm else f"list {unit.path!r} in {name}"
    told = "excludes it" if rule.algorithm is None else "does not exclude it"
    what = f"stored in {stored}, but the ignore list of {settings.source} {told} under the served name {unit.path}"
    if rule.algorithm is None:
        return what, f"remove what matches it from the ignore list ({_matching(unit, settings)})"
    return what, f"add {entry!r} to the ignore list"


def _of_list(kind: str, module: Module, what: str, fix: str) -> Finding:
    return _module_finding("mtp_mismatch" if module.kind is LayerKind.MTP else kind, module, what, fix)


def _matching(unit: Served, settings: Settings) -> str:
    if settings.method == "compressed-tensors":
        alone = (dataclasses.replace(settings, ignore=(entry,)) for entry in settings.ignore)
        ruled = ((one.ignore[0], rulings([unit], one)[0][1]) for one in alone)
        return ", ".join(entry for entry, rule in ruled if rule.by == "ignore" and (rule.algorithm is None or rule.raises))
    return ", ".join(
        entry for entry in settings.ignore if is_excluded(unit.path, unit.shards, unit.is_routed, [entry]) is not False
    )


def _unmatched_entries(checkpoint: Checkpoint, settings: Settings, units: Sequence[Served]) -> Iterator[Finding]:
    """Plain entries that name nothing: neither a stored module nor the fused one that the server makes of it."""
    stored = {name.rpartition(".")[0] for name in checkpoint.tensors}
    names = _Names(stored | {path for unit in units for path in (unit.path, *unit.shards)})
    listed = "quantized_layers" if settings.method == "modelopt" else "config_groups"
    targets = [target for target, _ in settings.targets]
    for kind, name, entries in (("ignore", "the ignore list", settings.ignore), ("target", listed, targets)):
        for entry in entries:
            if _may_match_nothing(entry) or any(map(names.have, with_prefixes(entry) if kind == "target" else (entry,))):
                continue
            what = f"this entry of {name} matches no stored and no fused module"
            fix = "correct the name: stored names and the server's fused ones (qkv_proj, gate_up_proj, experts) are understood"
            yield Finding(f"{kind}_unmatched", entry, what, str(settings.source), EVERY_BACKEND, fix)


class _Names:
    """Answers whether an entry is a run of whole dotted parts inside any path, for lists as long as the checkpoint.

    Paths are grouped by what is left of them without numbers; of each group the runs of one place and length are kept.
    """

    def __init__(self, paths: Iterable[str]):
        self._of: dict[tuple[str, ...], list[tuple[str, ...]]] = collections.defaultdict(list)
        for path in paths:
            parts = tuple(path.split("."))
            self._of[_without_numbers(parts)].append(parts)
        self._runs: dict[tuple, set[tuple[str, ...]]] = {}

    def have(self, entry: str) -> bool:
        parts = tuple(entry.rstrip(".").split("."))
        wanted, length = _without_numbers(parts), len(parts)
        return any(
            role[start : start + length] == wanted and parts in self._at(role, start, length)
            for role in self._of
            for start in range(len(role) - length + 1)
        )

    def _at(self, role: tuple[str, ...], start: int, length: int) -> set[tuple[str, ...]]:
        key = role, start, length
        if key not in self._runs:
            self._runs[key] = {parts[start : start + length] for parts in self._of[role]}
        return self._runs[key]


def _without_numbers(parts: Iterable[str]) -> tuple[str, ...]:
    return tuple("*" if part.isdigit() else part for part in parts)


def _may_match_nothing(entry: str) -> bool:
    """A pattern, a class, or a part that an export may leave out. A wrong one shows in the modules that it should have met."""
    is_class = "." not in entry and entry[:1].isupper()
    return "*" in entry or entry.startswith("re:") or is_class or any(part.startswith(_MAY_BE_ABSENT) for part in entry.split("."))


def _module_finding(kind: str, module: Module, what: str, fix: str) -> Finding:
    return Finding(kind, module.info.name, what, module.info.file.name, EVERY_BACKEND, fix)
