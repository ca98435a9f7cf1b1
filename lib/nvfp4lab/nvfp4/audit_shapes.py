"""Has every layer the dtypes and shapes of its format, and does each rank's part fit the kernels?

Whether sizes fit each other and config.json is `audit_dimensions`' question.
"""

import math
from collections.abc import Iterator, Mapping

from nvfp4lab.nvfp4.audit_finding import EVERY_BACKEND, Finding
from nvfp4lab.nvfp4.checkpoint import TensorInfo
from nvfp4lab.nvfp4.checkpoint_modules import LayerKind, Module, shares_one_scale
from nvfp4lab.nvfp4.conventions import BLOCK_SIZE

_DTYPES = {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"}
_ROW_PARALLEL = ("o_proj", "down_proj", "w2", "out_proj")  # tensor parallelism splits their input, the others' output
_EXPORT_AGAIN = "export the checkpoint again"
_PLAIN_DTYPES = ("BF16", "F16", "F32", "F64")


def findings(modules: Mapping[str, Module]) -> Iterator[Finding]:
    """Wrong dtypes and shapes within each module."""
    for module in modules.values():
        if module.is_fp4 and module.kind is not LayerKind.VISION:
            yield from list(_dtypes(module)) or _shapes(module)
        elif module.stored_as == "bf16" and module.info.dtype not in _PLAIN_DTYPES:
            yield _finding("wrong_dtype", module.info, f"is {module.info.dtype} without any scale")


def alignment(modules: Mapping[str, Module], tp: int, ep: int) -> Iterator[Finding]:
    """What breaks a kernel's alignment when FP4 layers are split over `tp` ranks and experts over `ep` of them.

    Marlin's limits were met on an H200; SGLang 0.5.17 checks a part of them at load and fails in the first GEMM.
    """
    seen: set[tuple] = set()
    for module in modules.values():
        weight = module.tensors.get("weight")
        if not module.is_fp4 or weight is None or len(weight.shape) != 2:
            continue
        n, k = _fused_rows(module, modules), weight.shape[1] * 2
        if n is None:
            continue  # judged with the first of its fused group
        key = (module.kind, module.is_routed, module.leaf, n, k)
        if key in seen:
            continue  # one finding for all layers alike
        seen.add(key)
        yield from _expert_alignment(module, n, k, tp, ep) if module.is_routed else _dense_alignment(module, n, k, tp)
    yield from _expert_split(modules, ep)


def _finding(kind: str, info: TensorInfo, what: str, hurts: str = EVERY_BACKEND, fix: str = _EXPORT_AGAIN) -> Finding:
    return Finding(kind, info.name, what, info.file.name, hurts, fix)


def _dtypes(module: Module) -> Iterator[Finding]:
    for leaf, dtype in _DTYPES.items():
        info = module.tensors.get(leaf)
        if info is not None and info.dtype != dtype:
            yield _finding("wrong_dtype", info, f"is {info.dtype}, the format has {dtype}")


def _shapes(module: Module) -> Iterator[Finding]:
    weight, scale = module.tensors.get("weight"), module.tensors.get("weight_scale")
    if weight is not None and weight.shape and weight.shape[-1] * 2 % BLOCK_SIZE:
        yield _finding(
            "wrong_shape", weight, f"{list(weight.shape)}: {weight.shape[-1] * 2} columns are no multiple of {BLOCK_SIZE}"
        )
    elif weight is not None and scale is not None:
        expected = (*weight.shape[:-1], weight.shape[-1] * 2 // BLOCK_SIZE)
        stacked = len(weight.shape) == 3 and math.prod(scale.shape) == math.prod(expected)  # stacks come transposed, too
        if scale.shape != expected and not stacked:
            yield _finding(
                "wrong_shape", scale, f"{list(scale.shape)}, needs {list(expected)} beside a weight {list(weight.shape)}"
            )
    experts = weight.shape[0] if weight is not None and len(weight.shape) == 3 else 1
    for leaf in ("weight_scale_2", "input_scale"):
        info = module.tensors.get(leaf)
        if info is not None and math.prod(info.shape) not in (1, experts, 2 * experts if experts > 1 else 1):
            yield _finding("wrong_shape", info, f"{list(info.shape)}, needs one number")


def _dense_alignment(module: Module, n: int, k: int, tp: int) -> Iterator[Finding]:
    n_rank, k_rank = (n, k / tp) if module.leaf in _ROW_PARALLEL else (n / tp, k)
    here = f"{n} x {k} over tp={tp} gives {n_rank:g} x {k_rank:g} a rank"
    info = module.tensors["weight"]
    if n_rank % 1 or k_rank % BLOCK_SIZE:
        fix = "use another tp"
        yield _finding(
            "tp_alignment", info, f"{here}; needs whole rows and whole blocks of {BLOCK_SIZE} columns", EVERY_BACKEND, fix
        )
    elif not ((n_rank % 64 == 0 and k_rank % 128 == 0) or (n_rank % 128 == 0 and k_rank % 64 == 0)):
        what = f"{here}; Marlin needs N % 64 and K % 128, or N % 128 and K % 64"
        yield _finding(
            "tp_alignment", info, what, "fp4 gemm: marlin before SGLang 0.5.23, which pads", "use another tp, or pad the model"
        )


def _fused_rows(module: Module, modules: Mapping[str, Module]) -> int | None:
    """Rows of the GEMM that a server makes of this module; None for all but the first of a fused group."""
    if module.is_routed:
        return module.tensors["weight"].shape[0]
    group = [modules[path] for path in shares_one_scale(module) if path in modules and "weight" in modules[path].tensors]
    return sum(member.tensors["weight"].shape[0] for member in group) if group[0] is module else None


def _expert_alignment(module: Module, n: int, k: int, tp: int, ep: int) -> Iterator[Finding]:
    is_down = module.leaf in _ROW_PARALLEL
    hidden, intermediate = (n, k) if is_down else (k, n)
    inside = max(tp // ep, 1)  # expert parallelism takes its ranks from tp; the rest split each expert
    per_rank = intermediate / inside
    info, here = module.tensors["weight"], f"intermediate {intermediate} over {inside} ranks is {per_rank:g} a rank"
    if per_rank % BLOCK_SIZE:
        yield _finding(
            "tp_alignment", info, f"{here}; needs whole blocks of {BLOCK_SIZE}", EVERY_BACKEND, "use another tp, or ep equal to tp"
        )
    elif per_rank % 64:
        what = f"{here}; gated experts need a multiple of 64"
        hurts = "moe: marlin, flashinfer_cutlass, flashinfer_cutedsl"
        yield _finding("tp_alignment", info, what, hurts, "use another tp, or ep equal to tp")
    if hidden % 128:
        yield _finding(
            "tp_alignment", info, f"hidden size {hidden}; fused MoE needs a multiple of 128", "moe: marlin", "pad the model"
        )


def _expert_split(modules: Mapping[str, Module], ep: int) -> Iterator[Finding]:
    counts: dict[str, int] = {}
    for module in modules.values():
        if module.expert is not None and module.is_fp4:
            counts[module.block] = max(counts.get(module.block, 0), module.expert + 1)
    for block, count in counts.items():
        if count % ep:
            what = f"{count} experts do not divide over ep={ep}"
            yield Finding(
                "ep_alignment", block, what, "", EVERY_BACKEND, "use an ep that divides the experts, or redundant experts"
            )
            return
