"""Which kernel really ran: the route read from source, the server's log and a profiler trace must name the same one.

A flag that is accepted may still end elsewhere (an `auto` that falls through, a fallback for a shape, a rewrite for an
architecture), and the speed of one kernel under the name of another is worse than no number. Each witness names a kernel
family or is silent. Families are told apart by the names in SIGNS; a trace holds what the GPU executed, the log and the
route only what was intended.
"""

import collections
import dataclasses
import enum
import gzip
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

Operation = str  # "fp4_gemm", "moe", or PLAIN where the checkpoint has no FP4 layer
PLAIN = "plain"
GZIP_MAGIC = b"\x1f\x8b"


class Family(enum.StrEnum):
    """Kernel families that an FP4 operation may end in; PLAIN ones compute with unquantised weights."""

    MARLIN = "marlin"
    CUTLASS = "cutlass"
    TRTLLM = "trtllm"
    CUDNN = "cudnn"
    CUTE_DSL = "cute-dsl"
    B12X = "b12x"
    TRITON = "triton"
    PLAIN = "plain"


# Names of backends in flags, logs and final calls -> family; the first match counts (cutedsl contains "cut").
BACKEND_SIGNS: tuple[tuple[re.Pattern[str], Family], ...] = (
    (re.compile(r"marlin"), Family.MARLIN),
    (re.compile(r"cute-?_?dsl", re.IGNORECASE), Family.CUTE_DSL),
    (re.compile(r"b12x"), Family.B12X),
    (re.compile(r"trtllm"), Family.TRTLLM),
    (re.compile(r"cudnn"), Family.CUDNN),
    (re.compile(r"cutlass"), Family.CUTLASS),
    (re.compile(r"triton"), Family.TRITON),
)

# Names of GPU kernels in a trace -> (operation, family). E2m1 is the element type of NVFP4.
TRACE_SIGNS: tuple[tuple[re.Pattern[str], Operation, Family], ...] = (
    (re.compile(r"marlin_moe(_wna16)?::Marlin\b|moe_wna16_marlin_gemm"), "moe", Family.MARLIN),
    (re.compile(r"marlin::Marlin\b|gptq_marlin_gemm"), "fp4_gemm", Family.MARLIN),
    (re.compile(r"b12x.*moe|moe.*b12x", re.IGNORECASE), "moe", Family.B12X),
    (re.compile(r"b12x", re.IGNORECASE), "fp4_gemm", Family.B12X),
    (re.compile(r"^bmm_\w*E2m1", re.IGNORECASE), "moe", Family.TRTLLM),  # trtllm-gen batches its experts
    (re.compile(r"^gemm_\w*E2m1", re.IGNORECASE), "fp4_gemm", Family.TRTLLM),
    (re.compile(r"cudnn.*(fp4|e2m1|block_?scale)|cudnn_generated", re.IGNORECASE), "fp4_gemm", Family.CUDNN),
    (re.compile(r"kernel_cutlass.*(moe|grouped|gather|swiglu)", re.IGNORECASE), "moe", Family.CUTE_DSL),
    (re.compile(r"kernel_cutlass.*(BlockScaled|fp4|e2m1)", re.IGNORECASE), "fp4_gemm", Family.CUTE_DSL),
    (re.compile(r"cutlass.*(MoeFC|moe_gemm|GroupProblemShape|grouped).*|fused_moe.*cutlass", re.IGNORECASE), "moe", Family.CUTLASS),
    (re.compile(r"cutlass.*(Fp4Gemm|float_e2m1|nv_float4)", re.IGNORECASE), "fp4_gemm", Family.CUTLASS),
    (re.compile(r"^fused_moe_kernel"), "moe", Family.TRITON),
    (
        re.compile(r"^(nvjet|sm\d+_xmma|ampere_\w*gemm|cublas)|gemvx|cutlass.*gemm_bf16|splitKreduce", re.IGNORECASE),
        PLAIN,
        Family.PLAIN,
    ),
    (re.compile(r"^aten::(mm|addmm|bmm|linear)$"), PLAIN, Family.PLAIN),  # a CPU trace has operators, no kernels
)


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What each witness named for one operation; None: silent. ok: the row may be quoted."""

    operation: Operation
    route: Family | None
    log: Family | None
    trace: tuple[Family, ...] | None
    ok: bool
    why: str


def agreement(operation: Operation, route: Family | None, log: Family | None, trace: tuple[Family, ...] | None) -> Agreement:
    """Whether the row counts: the trace names one family, and no other witness names another; a silent one is no objection.

    trace: families seen for this operation, () for none, None where no trace was taken. At least one of route and log must
    speak, for a trace alone cannot tell what was meant.
    """
    intended = {family for family in (route, log) if family is not None}
    told = f"route: {route or 'silent'}, log: {log or 'silent'}, trace: {_words(trace)}"
    if len(intended) > 1:
        why = "route and log name different kernels"
    elif trace is None:
        why = "no trace was taken"
    elif len(trace) != 1:
        why = "the trace shows no kernel of this operation" if not trace else "the trace shows several kernels for one operation"
    elif not intended:
        why = "neither route nor log says which kernel was meant"
    elif intended != set(trace):
        why = "another kernel ran than the one meant"
    else:
        return Agreement(operation, route, log, trace, True, told)
    return Agreement(operation, route, log, trace, False, f"{why} ({told})")


def of_backend(name: str | None) -> Family | None:
    """Family of a flag's value, a log's word or a route's final call; None for `auto` and unknown names."""
    return next((family for sign, family in BACKEND_SIGNS if name and sign.search(name)), None)


def of_route(details: Mapping, backend: str) -> Family | None:
    """Family that a route record ends in. `flashinfer.mm_fp4` leaves the choice to its `backend` argument, so to the flag."""
    final = details.get("final_call") or ""
    return of_backend(final) or of_backend(details.get("resolved_backend") or backend)


def of_log(text: str, operation: Operation) -> Family | None:
    """Family that the server's log names: its last "Use X as ... runner backend", else the resolved server arguments."""
    if operation == PLAIN:
        return Family.PLAIN if re.search(r"['\"]?quantization['\"]?[=:] ?None", text) else None
    words = {"moe": "MoE runner backend", "fp4_gemm": "FP4 GEMM runner backend"}[operation]
    chosen = re.findall(rf"Use (\w+) as (?:the )?{words}", text)
    field = {"moe": "moe_runner_backend", "fp4_gemm": "fp4_gemm_runner_backend"}[operation]
    resolved = re.findall(rf"['\"]?{field}['\"]?[=:] ?['\"](\w+)['\"]", text)
    return of_backend(chosen[-1]) if chosen else of_backend(resolved[-1]) if resolved else None


def kernel_names(trace: Path | str) -> Mapping[str, int]:
    """Name -> number of launches in a torch-profiler trace (Chrome JSON, `.gz` too): GPU kernels, or operators of a CPU trace."""
    content = Path(trace).read_bytes()
    events = json.loads(gzip.decompress(content) if content[:2] == GZIP_MAGIC else content)["traceEvents"]
    kernels = collections.Counter(event["name"] for event in events if event.get("cat") == "kernel")
    return kernels or collections.Counter(event["name"] for event in events if event.get("cat") == "cpu_op")


def of_trace(names: Iterable[str], operation: Operation) -> tuple[Family, ...]:
    """Families that the kernel `names` of a trace show for `operation`, in the order of SIGNS."""
    found = []
    for name in names:
        sign = next(((op, family) for pattern, op, family in TRACE_SIGNS if pattern.search(name)), None)
        if sign is not None and sign[0] == operation and sign[1] not in found:
            found.append(sign[1])
    return tuple(found)


def _words(trace: tuple[Family, ...] | None) -> str:
    return "none taken" if trace is None else " and ".join(trace) or "nothing"
