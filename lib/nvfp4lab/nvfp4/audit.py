"""Is the checkpoint itself sound? Headers first, then the scale tensors, never the weights.

    report = audit("model/folder", tp=4, ep=1)
    report.findings          # what, where, which backend it hurts, how to fix; empty for a clean checkpoint
    report.summary.fp4       # FP4 layers by kind
    moot_flags(report.summary)   # backend flags that touch no layer of this checkpoint
    summarise("model/folder")    # the summary alone, from the headers

A server loads most broken checkpoints without a word: SGLang's loaders skip names that they do not know and leave the
rest of a parameter as it was allocated.
"""

import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path

from nvfp4lab.nvfp4 import audit_config, audit_dimensions, audit_files, audit_kv, audit_rules, audit_scales, audit_shapes
from nvfp4lab.nvfp4.audit_finding import Finding, Settings
from nvfp4lab.nvfp4.checkpoint import Checkpoint, open_checkpoint
from nvfp4lab.nvfp4.checkpoint_modules import LayerKind, Module, modules_of

COUNTED = (LayerKind.DENSE, LayerKind.SHARED_EXPERT, LayerKind.ROUTED_EXPERT, LayerKind.MTP)


@dataclasses.dataclass(frozen=True)
class Summary:
    """What the checkpoint is. fp4, other: Linear modules by kind, stored in FP4 and not; a stack of experts counts once."""

    architecture: str
    fp4: Mapping[str, int]
    other: Mapping[str, int]
    tensors: int
    shards: int
    size_bytes: int


@dataclasses.dataclass(frozen=True)
class Report:
    """Result of an audit. read_bytes: how much of the checkpoint was read beyond its headers."""

    directory: Path
    findings: tuple[Finding, ...]
    summary: Summary
    read_bytes: int


def audit(directory: Path | str, tp: int | None = None, ep: int | None = None) -> Report:
    """Audit the checkpoint in `directory`; a plain folder or a hub cache's model folder.

    tp, ep: check also that every rank's part fits the kernels' alignments under these parallel sizes.
    Raises LabError when there is no checkpoint to look at.
    """
    checkpoint = open_checkpoint(directory)
    modules = _modules(checkpoint)
    settings = Settings.of(checkpoint)
    units = audit_rules.rulings(audit_rules.served(modules), settings)
    scalars, blocks = audit_scales.to_read(checkpoint, modules)
    scalars += audit_kv.to_read(checkpoint, settings)
    scales = audit_scales.read(scalars, blocks)
    shapes = list(audit_shapes.findings(modules))
    findings = [
        *audit_files.findings(checkpoint, modules),
        *audit_config.findings(checkpoint, settings, modules, units),
        *audit_kv.findings(checkpoint, settings, scales.scalars),
        *shapes,
        *audit_dimensions.findings(checkpoint, modules, {finding.tensor for finding in shapes}),
        *audit_scales.findings(modules, scales, audit_rules.weight_only(units), checkpoint.is_partial),
        *(audit_shapes.alignment(modules, tp or 1, ep or 1) if tp or ep else ()),
    ]
    read_bytes = sum(info.stop - info.start for info in (*scalars, *blocks))
    return Report(checkpoint.directory, tuple(findings), _summary(checkpoint, modules), read_bytes)


def summarise(directory: Path | str) -> Summary:
    """The summary alone, from the headers: no scale is read. Raises LabError as `audit` does."""
    checkpoint = open_checkpoint(directory)
    return _summary(checkpoint, _modules(checkpoint))


def moot_flags(summary: Summary) -> dict[str, str]:
    """Server flags that cannot change anything for this checkpoint, each with the reason."""
    fp4, other = summary.fp4, summary.other
    routed = fp4[LayerKind.ROUTED_EXPERT] + other[LayerKind.ROUTED_EXPERT]
    # SGLang serves Mixtral under any ModelOpt quantisation as QuantMixtralForCausalLM: its experts are plain Linears.
    experts_are_linears = summary.architecture == "MixtralForCausalLM" and any(fp4.values())
    linears = fp4[LayerKind.DENSE] + fp4[LayerKind.SHARED_EXPERT] + (fp4[LayerKind.ROUTED_EXPERT] if experts_are_linears else 0)
    moot = {}
    if not linears:
        experts = fp4[LayerKind.ROUTED_EXPERT]
        what = f"all {experts} FP4 layers are routed experts" if experts else "no layer is FP4"
        moot["--fp4-gemm-backend"] = f"no dense or shared-expert layer of this checkpoint is FP4 ({what})"
    if not routed or experts_are_linears:
        as_linears = "SGLang serves quantised Mixtral experts as plain linear layers"
        why = as_linears if experts_are_linears else "the model has no routed experts"
        moot |= {flag: why for flag in ("--moe-runner-backend", "--moe-a2a-backend", "--ep-size")}
    if not (fp4[LayerKind.MTP] + other[LayerKind.MTP]):
        moot["--speculative-algorithm NEXTN"] = "no MTP layer is stored"
    return moot


def _modules(checkpoint: Checkpoint) -> dict[str, Module]:
    return modules_of(checkpoint.tensors, checkpoint.text_config.get("num_hidden_layers"))


def _summary(checkpoint: Checkpoint, modules: Mapping[str, Module]) -> Summary:
    fp4 = collections.Counter(module.kind for module in modules.values() if module.is_fp4)
    other = collections.Counter(module.kind for module in modules.values() if not module.is_fp4)
    files = {info.file for info in checkpoint.tensors.values()}
    return Summary(
        architecture=next(iter(checkpoint.config.get("architectures") or ("unknown",))),
        fp4={kind: fp4[kind] for kind in COUNTED},
        other={kind: other[kind] for kind in COUNTED},
        tensors=len(checkpoint.tensors),
        shards=len(files),
        size_bytes=sum(file.stat().st_size for file in files),
    )
