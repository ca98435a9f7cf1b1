"""How SGLang's Marlin kernels add partial sums up, what that does to exact probes, and what it costs or gains in time.

    python bench/marlin_reductions.py

Marlin splits K over thread blocks and adds their results up by bf16 atomics, in fp32 by locks, or in bf16 by locks. SGLang
chooses: atomics in the MoE kernel always from SM90 on, in the dense kernel where N < 2048 <= K. Each way is forced here, by
the argument that SGLang itself passes, on the same operands. Needs a GPU and SGLang with its Marlin modules.

One JSON object a line on stdout: shape, probe, reduction, verdict, kind, reason; for timed ones median_ms with its interval.
"""

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from nvfp4lab.kernels import backends, cases, isolate_worker, plan, timing
from nvfp4lab.kernels.cases import Case
from nvfp4lab.kernels.shapes import GemmShape, MoeShape, Shape
from nvfp4lab.stack import capture

MOE, DENSE = "sglang.moe_wna16_marlin_gemm", "sglang.gptq_marlin_gemm"
MOE_PROBES = ("exact_moe_small", "exact_moe", "exact_moe_skewed", "expert_number", "token_batch_invariance", "realistic_moe")
DENSE_PROBES = ("exact_t8", "exact_t13", "exact_t24", "rounding", "global_scale", "exact_bf16", "realistic")
AS_CALLED = "as SGLang calls it"
# Qwen3-30B-A3B whole, and split over four GPUs where SGLang's choice for the dense kernel changes; a MoE of few experts.
MOE_SHAPES = (MoeShape(16, 2048, 768, 128, 8), MoeShape(256, 2048, 768, 8, 2))
DENSE_SHAPES = (GemmShape(16, 2048, 4096), GemmShape(16, 1280, 2048), GemmShape(256, 2048, 4096))
# Arguments that replace SGLang's own, by the words for them.
MOE_WAYS: dict[str, dict[str, bool]] = {
    AS_CALLED: {},
    "fp32, no atomics": {"use_atomic_add": False},
    "bf16, no atomics": {"use_atomic_add": False, "use_fp32_reduce": False},
}
DENSE_WAYS = {"atomics": True, "fp32, no atomics": False}
TIMED_MOE = tuple(MoeShape(tokens, 2048, 768, 128, 8) for tokens in (1, 16, 64, 4096))
TIMED_DENSE = tuple(GemmShape(m, n, 2048) for n in (1280, 5120) for m in (1, 16, 64, 4096))


@contextlib.contextmanager
def moe_reduction(**arguments: bool) -> Iterator[None]:
    """SGLang's fused Marlin MoE with these arguments in both of its GEMMs."""
    from sglang.srt.layers.moe.fused_moe_triton import fused_marlin_moe as module

    def forced(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return functools.wraps(kernel)(lambda *given, **named: kernel(*given, **named | arguments))

    names = [name for name in vars(module) if name.startswith("moe_wna16_marlin_gemm")]
    if not names:
        raise SystemExit("this SGLang has no moe_wna16_marlin_gemm in fused_marlin_moe; nothing would be forced")
    with mock.patch.multiple(module, **{name: forced(getattr(module, name)) for name in names}):
        yield


@contextlib.contextmanager
def dense_reduction(use_atomic_add: bool) -> Iterator[None]:
    """SGLang's dense Marlin with this answer to whether atomics are wanted."""
    from sglang.srt.layers.quantization import marlin_utils_fp4 as module

    with mock.patch.object(module, "should_use_atomic_add_reduce", lambda *_, **__: use_atomic_add):
        yield


def ways_of(backend: str) -> dict[str, contextlib.AbstractContextManager]:
    """Each way to add up, as a context in which SGLang uses it."""
    if backend == MOE:
        return {words: moe_reduction(**arguments) for words, arguments in MOE_WAYS.items()}
    return {AS_CALLED: contextlib.nullcontext()} | {words: dense_reduction(choice) for words, choice in DENSE_WAYS.items()}


def rows(backend: str, shape: Shape, probe: str, is_timed: bool) -> Iterator[dict[str, Any]]:
    """One row a reduction.

    A row that fails in another way than by its verdict says so, and ends the rest only if the device is of no use after it:
    then whatever came next would be blamed for it.
    """
    case = Case(backend, probe, shape)
    for words, forced in ways_of(backend).items():
        row = {"shape": shape.label, "probe": probe, "reduction": words}
        try:
            with forced:
                result = timing.time_case(cases.open_case(case)) if is_timed else cases.run_case(case)
        except Exception as error:  # one combination of many
            yield row | {"verdict": "crash", "reason": f"{type(error).__name__}: {error}"[:300]}
            isolate_worker.probe_own_context()
            continue
        median = next((number for number in result.numbers if number.name == "median_ms"), None)
        time = {"median_ms": median.value, "low_ms": median.low, "high_ms": median.high} if median else {}
        how = {"timing_method": result.details["timing_method"]} if median else {}
        yield row | {"verdict": str(result.verdict), "kind": str(result.kind or ""), "reason": result.reason[:300]} | time | how


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    for name in (MOE, DENSE):
        if why := backends.find(name).is_available():
            raise SystemExit(f"{name}: {why}")
    plans = (
        (MOE, MOE_SHAPES, MOE_PROBES, False),
        (DENSE, DENSE_SHAPES, DENSE_PROBES, False),
        (MOE, TIMED_MOE, (plan.decisive_probe(backends.find(MOE)).name,), True),
        (DENSE, TIMED_DENSE, (plan.decisive_probe(backends.find(DENSE)).name,), True),
    )
    for backend, shapes, names, is_timed in plans:
        for shape in shapes:
            for probe in names:
                for row in rows(backend, shape, probe, is_timed):
                    print(json.dumps(row), flush=True)
    print(f"machine: {capture().machine}", file=sys.stderr)


if __name__ == "__main__":
    main()
