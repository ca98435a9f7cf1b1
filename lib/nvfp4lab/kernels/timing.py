"""How long a kernel takes, with the method named: CUPTI where it works, and never a number for a wrong kernel.

`time_case` gates a prepared case, times it on realistic operands, and gates it again: a kernel that passes once and fails
after a thousand calls (a stale workspace, a race) has no speed. GPU times come from `flashinfer.testing.bench_gpu_time`;
what it falls back to without CUPTI is recorded and said aloud, since launch overhead is then part of the number. A call that
can be captured is timed as the replay of its CUDA graph, as a server decodes: launched one by one, the several kernels of a
fused MoE wait for the host, and on an H200 two runs of one case differed by 1.9 times for that alone. What was timed as a
replay is gated as a replay too: a kernel that stayed outside the graph would look fast and leave the output as it was.
"""

import contextlib
import dataclasses
import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from nvfp4lab.kernels import timing_events, timing_gpu, variants
from nvfp4lab.kernels.cases import CaseResult, OpenCase
from nvfp4lab.records import Number, Verdict, WrongKind

WARM_UP_MS, REPEAT_MS = 25, 100
GRAPH_REPLAY = "cupti_graph"
_CPU_CALLS = (5, 200)  # fewest and most
_Z_95 = 1.96


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Times of single calls in ms.

    method: "cupti_graph" (first kernel's start to last one's end in the replay of a CUDA graph), "cupti" (the same with the
    launches one by one), "cuda_events" (with launch overhead) or "cpu_clock". note: why the better method was not used.
    cold_l2: whether the L2 cache was flushed before every call.
    gpu: clocks, power and temperature meanwhile; empty on a CPU or without NVML.
    """

    times_ms: tuple[float, ...]
    method: str
    cold_l2: bool
    note: str = ""
    gpu: tuple[Number, ...] = ()

    def median(self) -> Number:
        """Median with its 95 % interval."""
        middle, low, high = median_interval(self.times_ms)
        return Number("median_ms", middle, "ms", low, high, len(self.times_ms))


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """(median, low, high): a 95 % interval of the median from order statistics, no distribution assumed.

    Ranks by the normal approximation of the binomial (Conover, Practical Nonparametric Statistics, 3.2). With fewer than
    six values no such interval exists and the extremes are returned. Raises ValueError without values.
    """
    if not values:
        raise ValueError("no times were measured")
    ordered, count = sorted(values), len(values)
    half_width = _Z_95 * math.sqrt(count) / 2
    low = max(0, math.floor(count / 2 - half_width) - 1)
    high = min(count - 1, math.ceil(count / 2 + half_width))
    return statistics.median(ordered), ordered[low], ordered[high]


def time_case(opened: OpenCase, measure: Callable[[OpenCase], Measurement] | None = None) -> CaseResult:
    """Gate, time, gate again. The result of the failing gate, without numbers, or the passing one with them.

    The second gate judges calls made after the timed ones, one of them in the way that was timed; `details["gate"]` says that
    it failed then.
    """
    before = opened.check(opened.call())
    if before.verdict is not Verdict.OK:
        return before
    measured = (measure or measure_call)(opened)
    after = _gate_again(opened, measured.method)
    if after.verdict is not Verdict.OK:
        reason = f"passed before it was timed, failed after {len(measured.times_ms)} timed calls: {after.reason}"
        return dataclasses.replace(after, reason=reason, numbers=(), details=dict(after.details) | {"gate": "after timing"})
    details = dict(after.details) | {"timing_method": measured.method, "cold_l2": measured.cold_l2, "timed_on": "realistic"}
    if measured.note:
        details["timing_note"] = measured.note
    return dataclasses.replace(after, numbers=(*after.numbers, *numbers(measured, opened)), details=details)


def _gate_again(opened: OpenCase, method: str) -> CaseResult:
    """The first failure of: a call, the replay of its graph if that is what was timed, the call on realistic operands."""
    after = opened.check(opened.call())
    if after.verdict is Verdict.OK and method == GRAPH_REPLAY:
        after = opened.check(variants.replayed(opened.call))
        if after.verdict is not Verdict.OK:
            return dataclasses.replace(after, reason=f"replayed from a CUDA graph: {after.reason}")
    if after.verdict is Verdict.OK and not torch.isfinite(opened.timed_call()).all():
        return dataclasses.replace(after, verdict=Verdict.WRONG, kind=WrongKind.NAN, reason="not finite on realistic operands")
    return after


def numbers(measured: Measurement, opened: OpenCase) -> tuple[Number, ...]:
    """Median, achieved TFLOP/s and GB/s with the median's interval carried over, the work of one call, the GPU's state."""
    median = measured.median()
    return (
        median,
        _rate("tflop_s", opened.flops / 1e9, "TFLOP/s", median),
        _rate("gb_s", opened.min_bytes / 1e6, "GB/s", median),
        Number("flops", opened.flops, "FLOP"),
        Number("min_bytes", opened.min_bytes, "B"),
        *measured.gpu,
    )


def _rate(name: str, work_per_ms: float, unit: str, median: Number) -> Number:
    """The longest time is the lowest rate."""
    return Number(name, work_per_ms / median.value, unit, work_per_ms / median.high, work_per_ms / median.low, median.n)


def measure_call(opened: OpenCase) -> Measurement:
    """Time `opened.timed_call` on its device by the best method there."""
    if opened.device.type == "cuda":
        return measure_gpu(opened.timed_call, opened.device, as_graph=opened.can_be_captured)
    return measure_cpu(opened.timed_call)


def measure_cpu(call: Callable[[], Any], clock_ns: Callable[[], int] = time.perf_counter_ns) -> Measurement:
    """Wall time of calls on the CPU, as many as fit into REPEAT_MS within bounds. For emulations: no cache is flushed."""
    call()
    times_ms: list[float] = []
    while len(times_ms) < _CPU_CALLS[0] or (sum(times_ms) < REPEAT_MS and len(times_ms) < _CPU_CALLS[1]):
        started = clock_ns()
        call()
        times_ms.append((clock_ns() - started) / 1e6)
    return Measurement(tuple(times_ms), "cpu_clock", cold_l2=False)


def measure_gpu(
    call: Callable[[], Any], device: torch.device, bench: Callable[..., list[float]] | None = None, as_graph: bool = False
) -> Measurement:
    """GPU time of calls with a cold L2, by FlashInfer's own timer. `bench`: stands in for it in tests.

    as_graph: of the replay of one captured call. Where that, or the timer, fails, the next best way is taken and the note says
    why. Raises RuntimeError if none gives times that can be: some, all finite and positive.
    """
    with timing_gpu.watch(device) as state:
        times_ms, method, note = _timed(bench or _flashinfer_timer(), call, device, as_graph)
    if note:
        print(f"TIMING FALLBACK: {note} {_PRICE[method]}", flush=True)
    return Measurement(tuple(times_ms), method, cold_l2=True, note=note, gpu=state.numbers())


_PRICE = {
    "cupti": "Where a call is several kernels, gaps in which they wait for the host are part of these numbers.",
    "cuda_events": "Launch overhead is part of these numbers.",
}


def _timed(
    bench: Callable[..., list[float]] | None, call: Callable[[], Any], device: torch.device, as_graph: bool
) -> tuple[list[float], str, str]:
    """(times in ms, method, why no better one). A timer that fails says nothing about the kernel."""
    why = [] if bench else ["flashinfer.testing is not installed."]
    ways = () if bench is None else (True, False) if as_graph else (False,)
    for use_cuda_graph in ways:
        try:
            times_ms, fallen = _by_flashinfer(bench, call, device, use_cuda_graph)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a refused capture, FlashInfer's or CUPTI's own; a fault of the kernel comes back below
            what = "The replay of its CUDA graph" if use_cuda_graph else "A call"
            why.append(f"{what} could not be timed: {type(error).__name__}: {' '.join(str(error).split())[:200]}.")
            continue
        if not use_cuda_graph:
            return times_ms, "cuda_events" if fallen else "cupti", " ".join(filter(None, (*why, fallen)))
        if not fallen:
            return times_ms, GRAPH_REPLAY, ""
        # Without CUPTI FlashInfer replays a graph over the same operands: a warm L2. The next way flushes.
    return _possible(timing_events.bench(call, WARM_UP_MS, REPEAT_MS)), "cuda_events", " ".join(why)


def _by_flashinfer(
    bench: Callable[..., list[float]], call: Callable[[], Any], device: torch.device, use_cuda_graph: bool
) -> tuple[list[float], str]:
    """(times in ms, what was said if CUPTI was not used): FlashInfer says that in a warning, and only there."""
    asked = {"enable_cupti": True, "use_cuda_graph": use_cuda_graph, "cold_l2_cache": True}
    with warnings.catch_warnings(record=True) as said, _stream_kept(device):
        warnings.simplefilter("always")
        times_ms = bench(call, dry_run_time_ms=WARM_UP_MS, repeat_time_ms=REPEAT_MS, **asked)
    return _possible(times_ms), next((str(one.message) for one in said if "falling back" in str(one.message).lower()), "")


def _stream_kept(device: torch.device) -> contextlib.AbstractContextManager:
    """Comes back to the current stream: `torch.cuda.graph` stays on its own when the capture turns out invalid at its end."""
    return torch.cuda.stream(torch.cuda.current_stream(device)) if device.type == "cuda" else contextlib.nullcontext()


def _possible(times_ms: list[float]) -> list[float]:
    if not times_ms or not all(math.isfinite(one) and one > 0 for one in times_ms):
        raise RuntimeError(f"the timer gave impossible times: {times_ms[:5]} ...")
    return times_ms


def _flashinfer_timer() -> Callable[..., list[float]] | None:
    try:
        from flashinfer.testing import bench_gpu_time
    except ImportError:
        return None
    return bench_gpu_time
