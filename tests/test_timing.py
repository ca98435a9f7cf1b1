"""Timing without a GPU: a clock that is set by hand, a timer that lies, kernels that go wrong while they are timed."""

import dataclasses
import math
import random
import statistics
import warnings

import pytest
import torch

from nvfp4lab.kernels import roofline, timing, timing_events, timing_gpu
from nvfp4lab.kernels.backends import sglang_marlin
from nvfp4lab.kernels.cases import Case, CaseResult, OpenCase, open_case
from nvfp4lab.kernels.roofline import Peaks
from nvfp4lab.kernels.shapes import GemmShape, MoeShape
from nvfp4lab.records import Evidence, Number, Stack, Target, Verdict, WrongKind

CPU = torch.device("cpu")
WRONG = CaseResult(Verdict.WRONG, "row 3 is NaN", WrongKind.NAN, details={"first_bad_row": 3})


class Kernel:
    """Counts its calls; its output says how many there were."""

    def __init__(self, wrong_from: float = math.inf):
        self.calls, self.wrong_from = 0, wrong_from

    def __call__(self) -> torch.Tensor:
        self.calls += 1
        return torch.tensor(float(self.calls))

    def check(self, output: torch.Tensor) -> CaseResult:
        return WRONG if output.item() >= self.wrong_from else CaseResult(Verdict.OK, details={"gate": "exact"})

    def opened(self) -> OpenCase:
        return OpenCase(self, self.check, self, flops=2e9, min_bytes=4e6, device=CPU)


def clock(*steps_ms: float):
    """A clock in ns that advances by each step in turn, two readings a call."""
    now, times = 0.0, []
    for step in steps_ms:
        times += [now, now + step]
        now += step + 1000.0  # what happens between two calls is not theirs
    readings = iter(times)
    return lambda: int(next(readings) * 1e6)


def test_a_cpu_time_is_the_time_of_the_calls_alone():
    kernel = Kernel()
    measured = timing.measure_cpu(kernel, clock(30.0, 10.0, 20.0, 40.0, 50.0))
    assert measured.times_ms == (30.0, 10.0, 20.0, 40.0, 50.0)
    assert (measured.method, measured.cold_l2, kernel.calls) == ("cpu_clock", False, 6)  # one to warm up
    assert measured.median() == Number("median_ms", 30.0, "ms", 10.0, 50.0, 5)


def test_fast_calls_are_bounded_in_number_and_slow_ones_in_time():
    assert len(timing.measure_cpu(Kernel(), clock(*[0.001] * 300)).times_ms) == 200
    assert len(timing.measure_cpu(Kernel(), clock(*[20.0] * 300)).times_ms) == 5


def test_the_interval_of_the_median_covers_it_as_often_as_it_says():
    draw = random.Random(7)
    hits = 0
    for _ in range(600):
        middle, low, high = timing.median_interval([draw.expovariate(1.0) for _ in range(41)])
        assert low <= middle <= high
        hits += low <= math.log(2) <= high
    assert 0.94 <= hits / 600 <= 0.995


@pytest.mark.parametrize("values", [[3.0], [2.0, 1.0], [5.0, 1.0, 4.0, 2.0, 3.0]])
def test_few_values_give_their_extremes(values):
    assert timing.median_interval(values) == (statistics.median(values), min(values), max(values))


def test_no_values_give_no_time():
    with pytest.raises(ValueError, match="no times"):
        timing.median_interval([])


def five_calls(opened: OpenCase) -> timing.Measurement:
    for _ in range(5):
        opened.timed_call()
    return timing.Measurement((2.0, 1.0, 4.0), "cuda_events", True, note="CUPTI is not installed")


def test_a_sound_kernel_has_a_speed_and_the_method_is_named():
    result = timing.time_case(Kernel().opened(), five_calls)
    found = {number.name: number for number in result.numbers}
    assert result.verdict is Verdict.OK
    assert (found["tflop_s"].value, found["tflop_s"].low, found["tflop_s"].high) == (1.0, 0.5, 2.0)
    assert (found["gb_s"].value, found["gb_s"].unit) == (2.0, "GB/s")
    assert result.details == {
        "gate": "exact",
        "timing_method": "cuda_events",
        "cold_l2": True,
        "timed_on": "realistic",
        "timing_note": "CUPTI is not installed",
    }


def test_a_wrong_kernel_is_not_timed():
    kernel = Kernel(wrong_from=1)
    assert timing.time_case(kernel.opened(), five_calls) == WRONG
    assert kernel.calls == 1


def test_a_kernel_that_goes_wrong_while_it_is_timed_has_no_speed():
    result = timing.time_case(Kernel(wrong_from=4).opened(), five_calls)
    assert (result.verdict, result.kind, result.numbers) == (Verdict.WRONG, WrongKind.NAN, ())
    assert result.reason == "passed before it was timed, failed after 3 timed calls: row 3 is NaN"
    assert result.details == {"first_bad_row": 3, "gate": "after timing"}


def test_a_kernel_that_fails_on_the_operands_it_is_timed_on_has_no_speed():
    opened = dataclasses.replace(Kernel().opened(), timed_call=lambda: torch.tensor([1.0, math.nan]))
    result = timing.time_case(opened, five_calls)
    assert (result.verdict, result.kind, result.numbers) == (Verdict.WRONG, WrongKind.NAN, ())
    assert "not finite on realistic operands" in result.reason


@pytest.mark.parametrize(
    ("backend", "probe", "shape"),
    [
        ("torch.reference_gemm", "exact_t8", GemmShape(4, 32, 256)),
        ("torch.reference_moe", "exact_moe_small", MoeShape(4, 64, 64, 4, 2)),
    ],
)
def test_times_are_taken_on_operands_of_many_distinct_values(backend, probe, shape):
    """A probe's operands have few distinct bits, on which a GPU draws less power and runs faster than on a model's."""
    opened = open_case(Case(backend, probe, shape, timed=True))
    assert opened.check(opened.call()).verdict is Verdict.OK
    exact, realistic = opened.call().clone(), opened.timed_call()
    assert realistic.shape == exact.shape and opened.check(realistic).verdict is Verdict.WRONG
    assert realistic.unique().numel() > 0.9 * realistic.numel() > exact.unique().numel()


@pytest.mark.parametrize(("method", "verdict"), [("cupti_graph", Verdict.WRONG), ("cupti", Verdict.OK)])
def test_what_was_timed_as_a_replay_is_gated_as_a_replay(monkeypatch, method, verdict):
    """A kernel that stays outside the captured graph: each plain call is right, its replay writes nothing."""
    opened = dataclasses.replace(Kernel().opened(), check=lambda output: WRONG if output.isnan() else CaseResult(Verdict.OK))
    monkeypatch.setattr(timing.variants, "replayed", lambda launch: torch.tensor(math.nan))
    result = timing.time_case(opened, lambda opened: timing.Measurement((2.0,), method, True))
    assert result.verdict is verdict and bool(result.numbers) == (verdict is Verdict.OK)
    if verdict is Verdict.WRONG:
        assert result.reason.endswith("replayed from a CUDA graph: row 3 is NaN") and result.details["gate"] == "after timing"


def bench_with(times, said: str = ""):
    def bench(call, **asked):
        assert asked["enable_cupti"] and asked["cold_l2_cache"]
        call()
        if said:
            warnings.warn(said, stacklevel=1)
        return times

    return bench


def test_cupti_is_named_only_if_it_was_used(capsys):
    assert timing.measure_gpu(Kernel(), CPU, bench_with([0.5, 0.6])).method == "cupti"
    assert timing.measure_gpu(Kernel(), CPU, bench_with([0.5], "l2_flush is deprecated")).method == "cupti"
    assert capsys.readouterr().out == ""
    said = "CUPTI is not installed. Try 'pip install -U cupti-python'. Falling back to CUDA events for benchmarking."
    fallen = timing.measure_gpu(Kernel(), CPU, bench_with([0.5], said))
    assert (fallen.method, fallen.note) == ("cuda_events", said)
    assert capsys.readouterr().out.startswith("TIMING FALLBACK: CUPTI is not installed")


def bench_of_graphs(refuses: Exception | None = None, said: str = ""):
    """A timer whose graph replays take 0.2 ms, and whose calls launched one by one take 0.9."""
    asked_for = []

    def bench(call, *, use_cuda_graph, **asked):
        asked_for.append(use_cuda_graph)
        if use_cuda_graph and refuses:
            raise refuses
        if said:
            warnings.warn(said, stacklevel=1)
        return [0.2] if use_cuda_graph else [0.9]

    return bench, asked_for


def test_a_call_that_can_be_captured_is_timed_as_the_replay_of_its_graph():
    bench, asked_for = bench_of_graphs()
    measured = timing.measure_gpu(Kernel(), CPU, bench, as_graph=True)
    assert (measured.times_ms, measured.method, measured.note, asked_for) == ((0.2,), "cupti_graph", "", [True])
    assert timing.measure_gpu(Kernel(), CPU, bench).method == "cupti"
    assert asked_for == [True, False]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("operation not permitted when stream is capturing\nmore"),
            "RuntimeError: operation not permitted when stream is capturing more",
        ),
        (  # FlashInfer, where CUPTI saw nothing of the replay
            ValueError("No kernel activities recorded for iteration 0"),
            "ValueError: No kernel activities recorded for iteration 0",
        ),
    ],
)
def test_a_call_whose_graph_cannot_be_timed_is_timed_one_by_one_and_says_so(capsys, error, told):
    bench, asked_for = bench_of_graphs(refuses=error)
    measured = timing.measure_gpu(Kernel(), CPU, bench, as_graph=True)
    note = f"The replay of its CUDA graph could not be timed: {told}."
    assert (measured.times_ms, measured.method, measured.note, asked_for) == ((0.9,), "cupti", note, [True, False])
    assert capsys.readouterr().out.startswith(f"TIMING FALLBACK: {note} Where a call is several kernels, gaps")


def test_a_timer_that_fails_is_no_crash_of_the_kernel(monkeypatch, capsys):
    def bench(call, **asked):
        raise ValueError("Inconsistent kernel names: {'a'} != {'b'}")

    monkeypatch.setattr(timing_events, "bench", lambda call, warm_up_ms, repeat_ms: [0.7])
    measured = timing.measure_gpu(Kernel(), CPU, bench)
    assert (measured.times_ms, measured.method) == ((0.7,), "cuda_events")
    assert measured.note == "A call could not be timed: ValueError: Inconsistent kernel names: {'a'} != {'b'}."
    assert capsys.readouterr().out.strip().endswith("Launch overhead is part of these numbers.")


def test_a_failed_capture_leaves_the_stream_that_was_current(monkeypatch):
    """`torch.cuda.graph` ends a capture before it leaves its stream; where ending raises, it never leaves."""
    current = ["ours"]

    class Stream:
        def __init__(self, stream):
            self.before, self.stream = current[0], stream

        def __enter__(self):
            current[0] = self.stream

        def __exit__(self, *_):
            current[0] = self.before

    def bench(call, *, use_cuda_graph, **asked):
        if use_cuda_graph:
            current[0] = "of the capture"
            raise RuntimeError("cudaErrorStreamCaptureInvalidated")
        assert current == ["ours"]
        return [0.9]

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "stream", Stream)
    assert timing.measure_gpu(Kernel(), torch.device("cuda"), bench, as_graph=True).method == "cupti"
    assert current == ["ours"]


def test_without_cupti_no_graph_is_timed_since_its_replays_would_find_a_warm_cache():
    bench, asked_for = bench_of_graphs(said="CUPTI is not installed. Falling back to CUDA events for benchmarking.")
    measured = timing.measure_gpu(Kernel(), CPU, bench, as_graph=True)
    assert (measured.times_ms, measured.method, measured.cold_l2, asked_for) == ((0.9,), "cuda_events", True, [True, False])


def test_exhausted_memory_is_not_taken_for_a_call_that_cannot_be_captured():
    def bench(call, **asked):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        timing.measure_gpu(Kernel(), CPU, bench, as_graph=True)


def test_what_a_server_captures_is_timed_captured(monkeypatch):
    asked_for = []
    monkeypatch.setattr(timing, "measure_gpu", lambda call, device, as_graph: asked_for.append(as_graph))
    monkeypatch.setattr("nvfp4lab.kernels.cases._device", lambda: CPU)
    opened = open_case(Case("torch.reference_gemm", "exact_t8", GemmShape(4, 32, 256)))
    for can_be_captured in (opened.can_be_captured, True):
        on_gpu = dataclasses.replace(opened, device=torch.device("cuda"), can_be_captured=can_be_captured)
        timing.measure_call(on_gpu)
    assert asked_for == [False, True]
    assert all("cuda_graph" in one.variants for one in sglang_marlin.BACKENDS)


def test_without_flashinfer_cuda_events_are_used_and_named(monkeypatch, capsys):
    monkeypatch.setattr(timing, "_flashinfer_timer", lambda: None)
    monkeypatch.setattr(timing_events, "bench", lambda call, warm_up_ms, repeat_ms: [0.7, 0.8])
    measured = timing.measure_gpu(Kernel(), CPU)
    assert (measured.times_ms, measured.method, measured.note) == (
        (0.7, 0.8),
        "cuda_events",
        "flashinfer.testing is not installed.",
    )
    assert capsys.readouterr().out.startswith("TIMING FALLBACK: flashinfer.testing is not installed.")


@pytest.mark.parametrize("times", [[], [0.5, 0.0], [-1.0], [math.nan], [math.inf]])
def test_impossible_times_are_refused(monkeypatch, times):
    monkeypatch.setattr(timing_events, "bench", lambda call, warm_up_ms, repeat_ms: [0.7])
    fallen = timing.measure_gpu(Kernel(), CPU, bench_with(times))
    assert (fallen.times_ms, fallen.method) == ((0.7,), "cuda_events") and "impossible times" in fallen.note
    monkeypatch.setattr(timing_events, "bench", lambda call, warm_up_ms, repeat_ms: times)
    with pytest.raises(RuntimeError, match="impossible"):
        timing.measure_gpu(Kernel(), CPU, bench_with(times))


def test_the_state_of_the_gpu_is_summed_up():
    state = timing_gpu.GpuState()
    assert state.numbers() == ()
    state.samples = [(1980.0, 2619.0, 300.0, 50.0, 0x1), (1500.0, 2619.0, 690.0, 61.0, 0x4), (1980.0, 2619.0, 650.0, 60.0, 0x0)]
    found = {number.name: number for number in state.numbers()}
    assert (found["sm_clock_mhz"].value, found["sm_clock_mhz"].low) == (1980.0, 1500.0)
    assert (found["power_w"].value, found["temperature_c"].value) == (650.0, 61.0)
    assert found["throttled_fraction"].value == pytest.approx(1 / 3)  # idle is not throttled, the power cap is


def test_without_a_gpu_nothing_is_sampled():
    with timing_gpu.watch(CPU) as state:
        pass
    assert state.samples == []


PEAKS = Peaks(1000.0, {"bf16": 100.0}, {}, "cupti")


def test_the_roofline_is_the_larger_of_two_times():
    assert PEAKS.attainable_s(flops=1e12, min_bytes=1e9, arithmetic="bf16") == pytest.approx(0.01)  # compute: 1e12 / 1e14
    assert PEAKS.attainable_s(flops=1e9, min_bytes=1e9, arithmetic="bf16") == pytest.approx(0.001)  # memory: 1e9 / 1e12
    assert PEAKS.attainable_s(1e9, 1e9, "fp4") is None


def row(*numbers: Number) -> Evidence:
    return Evidence("kernel", "gemm:x", Target("9.0"), Stack(), Verdict.OK, "repeat", numbers=numbers)


def test_the_fraction_of_the_roofline_needs_a_time_and_a_peak():
    timed = row(Number("median_ms", 2.0, "ms", 1.0, 4.0, 9), Number("flops", 1e9, "FLOP"), Number("min_bytes", 1e9, "B"))
    found = roofline.with_fraction(timed, PEAKS, "bf16")
    assert found.number("roofline_fraction") == Number("roofline_fraction", 0.5, "", 0.25, 1.0, 9)
    assert found.details["roofline"] == {"bound": "memory", "arithmetic": "bf16"}
    assert roofline.with_fraction(timed, PEAKS, "fp4") == timed
    untimed = row()
    assert roofline.with_fraction(untimed, PEAKS, "bf16") == untimed


def test_peaks_of_this_cpu_are_measured_and_what_it_cannot_do_is_told(monkeypatch):
    monkeypatch.setattr(roofline, "_SQUARE", {"cpu": 128})
    monkeypatch.setattr(roofline, "_COPY_BYTES", {"cpu": 1 << 22})
    peaks = roofline.measure_peaks("cpu")
    assert peaks.method == "cpu_clock"
    assert 0.1 < peaks.memory_gb_s < 10_000
    assert 0 < peaks.tflop_s["fp32"] < 100
    assert peaks.refused["fp4"].startswith("NotImplementedError")
    assert {number.name for number in peaks.numbers()} >= {"peak_memory_gb_s", "peak_fp32_tflop_s"}
