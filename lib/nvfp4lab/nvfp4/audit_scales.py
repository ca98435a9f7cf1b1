"""Are the scales numbers that a kernel can multiply by, and do those that a server merges agree?"""

import collections
import math
import statistics
from collections.abc import Container, Iterator, Mapping, Sequence

from nvfp4lab.nvfp4.audit_finding import EVERY_BACKEND, W4A4_BACKENDS, Finding
from nvfp4lab.nvfp4.checkpoint import Checkpoint, TensorInfo
from nvfp4lab.nvfp4.checkpoint_modules import LayerKind, Module, shares_one_scale
from nvfp4lab.nvfp4.checkpoint_scales import Scales, read_scales

read = read_scales
_SCALAR_DTYPES = ("F32", "BF16", "F16", "F64")
_MAX_SCALAR_BYTES = 1 << 20  # [experts, 2] float32 at most; anything larger is no per-tensor scale
_JUDGED = (LayerKind.DENSE, LayerKind.SHARED_EXPERT, LayerKind.ROUTED_EXPERT, LayerKind.MTP)
RELATIVE_TOLERANCE = 1e-5  # as SGLang's own check of gate and up (torch.allclose)
# Experts see different tokens, so their input scales differ, but never by this much from the median of their layer.
CALIBRATION_FACTOR = 4096.0
UNCALIBRATED = 1.0  # what an exporter writes for an expert that saw no token
_GATE_UP_HURTS = "moe: marlin, flashinfer_cutlass, flashinfer_cutedsl (they keep the gate's; flashinfer_trtllm uses both)"


def to_read(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> tuple[list[TensorInfo], list[TensorInfo]]:
    """(small float scales, E4M3 block scales) that are worth reading."""
    scalars, blocks = [], []
    for module in modules.values():
        for leaf, info in module.tensors.items():
            if not info.is_consistent or leaf == "weight":
                continue
            if leaf == "weight_scale" and info.dtype == "F8_E4M3":
                blocks.append(info)
            elif leaf != "weight_scale" and is_small_float(info):
                scalars.append(info)
    return scalars, blocks


def is_small_float(info: TensorInfo) -> bool:
    """Whether it may be a scale (or a few) of its own, whose values can be read."""
    return info.is_consistent and info.dtype in _SCALAR_DTYPES and info.stop - info.start <= _MAX_SCALAR_BYTES


def findings(modules: Mapping[str, Module], scales: Scales, weight_only: Container[str], is_partial: bool) -> Iterator[Finding]:
    """Every scale that is absent (unless the checkpoint is partial), zero, not finite, or at odds with its partners.

    weight_only: paths of modules whose activations stay in bf16, so that they need no input_scale.
    """
    judged = {path: module for path, module in modules.items() if module.is_fp4 and module.kind in _JUDGED}
    calibrated = {path: module for path, module in judged.items() if path not in weight_only}
    uncalibrated = {} if is_partial else _uncalibrated(calibrated, scales)
    for module in judged.values():
        needs_input = module.path in calibrated
        if not is_partial:
            yield from _absent(module, needs_input and module.path not in uncalibrated)
        yield from _scalar(module, scales, "weight_scale_2", "global_scale", EVERY_BACKEND)
        if needs_input and module.path not in uncalibrated:
            yield from _scalar(module, scales, "input_scale", "input_scale", W4A4_BACKENDS)
        yield from _blocks(module, scales)
    yield from (_uncalibrated_finding(judged[path], why) for path, why in uncalibrated.items())
    yield from _mismatched(judged, scales)


def _absent(module: Module, needs_input: bool) -> Iterator[Finding]:
    kinds = {"weight_scale": "block_scale_missing", "weight_scale_2": "global_scale_missing"}
    hurts = {"input_scale": W4A4_BACKENDS}
    for leaf, kind in (kinds | ({"input_scale": "input_scale_missing"} if needs_input else {})).items():
        if leaf not in module.tensors:
            what = f"an FP4 weight without its {leaf}; the server multiplies by whatever was in memory"
            fix = "calibrate and export again" if leaf == "input_scale" else "export the checkpoint again"
            yield Finding(kind, f"{module.path}.{leaf}", what, module.info.file.name, hurts.get(leaf, EVERY_BACKEND), fix)


def _scalar(module: Module, scales: Scales, leaf: str, name: str, hurts: str) -> Iterator[Finding]:
    info = module.tensors.get(leaf)
    values = scales.scalars.get(info.name, ()) if info else ()
    bad = next((value for value in values if not math.isfinite(value) or value <= 0), None)
    if info is None or bad is None:
        return
    kind = f"{name}_zero" if math.isfinite(bad) else f"{name}_nonfinite"
    yield Finding(kind, info.name, f"holds {bad}", info.file.name, hurts, "calibrate and export this layer again")


def _blocks(module: Module, scales: Scales) -> Iterator[Finding]:
    info = module.tensors.get("weight_scale")
    counts = scales.blocks.get(info.name) if info else None
    if info is None or counts is None:
        return
    fixes = {
        "zero": "these weights are lost: quantise the layer again with a global scale of its own, or clamp block scales to 2^-9",
        "nan": "quantise this layer again",
        "negative": "quantise this layer again; kernels that take scales as unsigned read a huge value",
    }
    for problem, fix in fixes.items():
        number = getattr(counts, problem)
        if number:
            what = f"{number} of {counts.total} block scales are {problem}, the first at flat index {counts.first_bad}"
            yield Finding(f"block_scale_{problem}", info.name, what, info.file.name, EVERY_BACKEND, fix)


def _uncalibrated(modules: Mapping[str, Module], scales: Scales) -> dict[str, str]:
    """Path -> reason for routed experts whose input_scale is not of a kind with those of their layer's other experts."""
    groups: dict[tuple[str, str], list[Module]] = collections.defaultdict(list)
    for module in modules.values():
        if module.expert is not None:
            groups[module.block, module.leaf].append(module)
    result = {}
    for group in groups.values():
        values = {module.path: _positive(module, scales) for module in group}
        known = [value for value in values.values() if value]
        if len(known) * 2 <= len(group) or len(group) < 3:
            continue  # most have none: that is no matter of single experts
        # Of those that were calibrated, even where they are few: the default is no measurement.
        median = statistics.median([value for value in known if value != UNCALIBRATED] or known)
        for module in group:
            if reason := _outlier(module, values[module.path], median):
                result[module.path] = reason
    return result


def _positive(module: Module, scales: Scales) -> float | None:
    info = module.tensors.get("input_scale")
    values = scales.scalars.get(info.name, ()) if info else ()
    return values[0] if len(values) == 1 and math.isfinite(values[0]) and values[0] > 0 else None


def _outlier(module: Module, value: float | None, median: float) -> str | None:
    if "input_scale" not in module.tensors:
        return "it has no input_scale, the other experts of this layer have one"
    if value is None:
        return None  # zero or not finite: reported as that
    if value == UNCALIBRATED and not 0.5 <= median <= 2.0:
        return f"its input_scale is the default 1.0, the median of its layer's calibrated experts {median:.3g}"
    if not 1 / CALIBRATION_FACTOR <= value / median <= CALIBRATION_FACTOR:
        return f"its input_scale is {value:.3g}, the median of its layer {median:.3g}"
    return None


def _uncalibrated_finding(module: Module, why: str) -> Finding:
    fix = "calibrate with more or other data until every expert is routed to, or give it the layer's largest input_scale"
    return Finding("expert_uncalibrated", f"{module.path}.input_scale", why, module.info.file.name, W4A4_BACKENDS, fix)


def _mismatched(modules: Mapping[str, Module], scales: Scales) -> Iterator[Finding]:
    for path, module in modules.items():
        group = [modules[member] for member in shares_one_scale(module) if member in modules]
        if group and group[0].path == path:
            values = [value for member in group for value in _global(member, scales)]
            if module.leaf in ("gate_up_proj", "w13") and len(values) > 1:
                yield from _mismatched_pairs(module, values)
            elif _differ(values):
                yield _mismatch(group, values)


def _global(module: Module, scales: Scales) -> Sequence[float]:
    info = module.tensors.get("weight_scale_2")
    return scales.scalars.get(info.name, ()) if info else ()


def _differ(values: Sequence[float]) -> bool:
    usable = [value for value in values if math.isfinite(value) and value > 0]  # others are findings of their own
    return len(usable) > 1 and max(usable) - min(usable) > RELATIVE_TOLERANCE * max(usable)


def _mismatched_pairs(module: Module, values: Sequence[float]) -> Iterator[Finding]:
    """A stack of experts stores [experts, 2]: gate and up of each."""
    if module.tensors["weight_scale_2"].shape[-1:] == (2,):
        for gate, up in zip(values[::2], values[1::2], strict=True):
            if _differ((gate, up)):
                yield _mismatch([module], (gate, up))
                return


def _mismatch(group: Sequence[Module], values: Sequence[float]) -> Finding:
    names = ", ".join(member.leaf for member in group)
    shown = ", ".join(f"{value:.6g}" for value in values)
    info = group[-1].tensors["weight_scale_2"]
    hurts = _GATE_UP_HURTS if group[0].is_routed else f"{EVERY_BACKEND}: the fused layer uses the largest for all"
    what = f"{names} are fused, their global scales differ: {shown}"
    fix = "quantise them with one global scale, that of the largest amax of the group"
    return Finding("global_scale_mismatch", info.name, what, info.file.name, hurts, fix)
