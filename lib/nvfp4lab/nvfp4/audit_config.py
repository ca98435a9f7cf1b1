"""Does the config say what the files hold: which modules are FP4, lm_head and router left alone, KV scales, W13 order?"""

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from nvfp4lab.nvfp4.audit_finding import EVERY_BACKEND, Finding, Settings, from_config_json, from_hf_quant_config
from nvfp4lab.nvfp4.checkpoint import Checkpoint
from nvfp4lab.nvfp4.checkpoint_modules import LINEAR_LEAVES, LayerKind, Module, is_excluded, names_path, served_module

NVFP4_ALGORITHMS = ("NVFP4", "NVFP4_AWQ", "W4A16_NVFP4", "MIXED_PRECISION")
_MAY_BE_ABSENT = ("lm_head", "mtp", "nextn", "visual", "vision", "audio", "embed")  # parts that an export may leave out
_UP_FIRST = ("up_gate_proj", "w31")


@dataclasses.dataclass(frozen=True)
class _Served:
    """One module as the server builds it: its path, its shards' paths, and the stored modules that it loads."""

    path: str
    shards: tuple[str, ...]
    stored: tuple[Module, ...]


def findings(checkpoint: Checkpoint, settings: Settings, modules: Mapping[str, Module]) -> Iterator[Finding]:
    """Every disagreement between config.json, hf_quant_config.json and the tensors."""
    yield from _declaration(checkpoint, settings, modules)
    yield from _must_stay_unquantised(modules)
    yield from _w13_order(checkpoint, modules)
    if settings.source is None:
        return
    yield from _kv_scales(checkpoint, settings)
    if settings.quant_algo in NVFP4_ALGORITHMS and settings.quant_algo != "MIXED_PRECISION":
        served = _served(modules)
        yield from (finding for unit in served if (finding := _disagreement(unit, settings)))
        yield from _unmatched_entries(checkpoint, settings, served)


def _declaration(checkpoint: Checkpoint, settings: Settings, modules: Mapping[str, Module]) -> Iterator[Finding]:
    first_fp4 = next((module.path for module in modules.values() if module.is_fp4), None)
    if settings.source is None:
        if first_fp4 and not checkpoint.quant_config:
            what = "FP4 tensors are stored, but neither config.json nor hf_quant_config.json declares a quantisation"
            yield _config_finding(
                "quantisation_undeclared", first_fp4, what, "config.json", "add hf_quant_config.json of the export"
            )
        return
    if settings.quant_algo not in NVFP4_ALGORITHMS and first_fp4:
        what = f"quant_algo is {settings.quant_algo!r}, the stored layers are NVFP4"
        yield _config_finding("config_invalid", "quant_algo", what, settings.source, 'set "quant_algo": "NVFP4"')
    if settings.group_size not in (None, 16) or (
        settings.group_size is None and settings.source == "hf_quant_config.json" and first_fp4
    ):
        what = f"group_size is {settings.group_size}; NVFP4 blocks are 16 long"
        yield _config_finding("config_invalid", "group_size", what, settings.source, 'set "group_size": 16')
    if checkpoint.hf_quant_config and checkpoint.quant_config.get("quant_algo"):
        ours, theirs = from_config_json(checkpoint.quant_config), from_hf_quant_config(checkpoint.hf_quant_config)
        for name in ("quant_algo", "ignore", "kv_fp8"):
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
        if module.is_fp4 and module.kind in (LayerKind.LM_HEAD, LayerKind.ROUTER):
            name = "lm_head" if module.kind is LayerKind.LM_HEAD else "router"
            what = f"the {name} is stored in FP4; servers build it unquantised, and its error reaches every token"
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


def _kv_scales(checkpoint: Checkpoint, settings: Settings) -> Iterator[Finding]:
    if not settings.kv_fp8 or checkpoint.is_partial:
        return
    attention = {name.partition(".self_attn.")[0] for name in checkpoint.tensors if ".self_attn." in name}
    scaled = {
        name.partition(".self_attn.")[0]
        for name in checkpoint.tensors
        if ".self_attn." in name and name.endswith((".k_scale", ".v_scale", ".kv_scale"))
    }
    for layer in sorted(attention - scaled):
        what = "an FP8 KV cache is declared, but this layer stores no k_scale and v_scale; servers use 1.0 and clip"
        hurts = "attention, every backend with --kv-cache-dtype fp8_e4m3 or auto"
        yield Finding(
            "kv_scale_missing",
            f"{layer}.self_attn",
            what,
            str(settings.source),
            hurts,
            "calibrate KV scales, or declare no KV quantisation",
        )


def _served(modules: Mapping[str, Module]) -> list[_Served]:
    groups: dict[tuple[str, tuple[str, ...]], list[Module]] = collections.defaultdict(list)
    for module in modules.values():
        if module.kind not in (LayerKind.ROUTER, LayerKind.VISION) and (module.leaf in LINEAR_LEAVES or module.is_routed):
            groups[served_module(module, modules)].append(module)
    return [
        _Served(path, shards, tuple(sorted(stored, key=lambda module: shards.index(module.path) if module.path in shards else 0)))
        for (path, shards), stored in groups.items()
    ]


def _disagreement(unit: _Served, settings: Settings) -> Finding | None:
    """The finding for one served module, if what the server will expect is not what is stored."""
    first = unit.stored[0]
    fp4 = {module.path for module in unit.stored if module.is_fp4}
    if first.kind is LayerKind.LM_HEAD and fp4:
        return None  # reported as lm_head_quantised
    mtp = first.kind is LayerKind.MTP
    if 0 < len(fp4) < len(unit.stored):
        odd = next(module for module in unit.stored if not module.is_fp4)
        what = f"{unit.path} is one layer for the server, but {odd.path} is stored in bf16 and {min(fp4)} in FP4"
        return _module_finding("mtp_mismatch" if mtp else "fused_mixed", odd, what, "quantise all of its parts or none")
    expected = is_excluded(unit.path, unit.shards, first.is_routed, settings.ignore)
    if expected is None:
        what = f"the ignore list has some but not all shards of {unit.path} ({', '.join(unit.shards)}); SGLang raises"
        return _module_finding(
            "mtp_mismatch" if mtp else "ignore_mismatch", first, what, "list all shards of the fused layer, or none"
        )
    if expected == bool(fp4):
        stored, told = ("FP4", "excludes it") if fp4 else ("bf16", "does not exclude it")
        what = f"stored in {stored}, but the ignore list of {settings.source} {told} under the served name {unit.path}"
        entry = f"{unit.path}*" if first.is_routed else unit.path
        fix = (
            f"remove what matches it from the ignore list ({_matching(unit, settings)})"
            if fp4
            else f"add {entry!r} to the ignore list"
        )
        return _module_finding("mtp_mismatch" if mtp else "ignore_mismatch", first, what, fix)
    return None


def _matching(unit: _Served, settings: Settings) -> str:
    return ", ".join(
        entry for entry in settings.ignore if is_excluded(unit.path, unit.shards, unit.stored[0].is_routed, [entry]) is not False
    )


def _unmatched_entries(checkpoint: Checkpoint, settings: Settings, served: Sequence[_Served]) -> Iterator[Finding]:
    """Plain entries that name nothing: neither a stored module nor the fused one that the server makes of it."""
    paths = {name.rpartition(".")[0] for name in checkpoint.tensors} | {
        path for unit in served for path in (unit.path, *unit.shards)
    }
    parts = {f".{'.'.join(path.split('.')[:end])}." for path in paths for end in range(1, path.count(".") + 2)}
    for entry in settings.ignore:
        if "*" in entry or any(part.startswith(_MAY_BE_ABSENT) for part in entry.split(".")):
            continue
        if f".{entry}." not in parts and not any(names_path(entry, path) for path in paths):
            what = "this entry of the ignore list matches no stored and no fused module"
            fix = "correct the name: stored names and the server's fused ones (qkv_proj, gate_up_proj, experts) are understood"
            yield Finding("ignore_unmatched", entry, what, str(settings.source), EVERY_BACKEND, fix)


def _module_finding(kind: str, module: Module, what: str, fix: str) -> Finding:
    return Finding(kind, module.info.name, what, module.info.file.name, EVERY_BACKEND, fix)
