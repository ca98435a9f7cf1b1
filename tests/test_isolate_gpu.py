"""Isolation on a real GPU: no poisoned context, hang or exhausted memory reaches the next case."""

import pytest

import isolate_gpu_cases as cases
from nvfp4lab.kernels import isolate_device
from nvfp4lab.kernels.isolate import Isolator
from nvfp4lab.kernels.isolate_outcome import Limits
from nvfp4lab.kernels.roofline import Peaks
from nvfp4lab.records import Verdict

pytestmark = pytest.mark.skipif(not isolate_device.has_gpu(), reason="no NVIDIA GPU here")


@pytest.fixture(scope="module")
def isolator(tmp_path_factory):
    with Isolator(tmp_path_factory.mktemp("isolated")) as isolator:
        yield isolator


@pytest.mark.parametrize(
    ("call", "verdict", "reason"),
    [
        (cases.illegal_access, Verdict.CRASH, "illegal memory access"),
        (cases.claim_success, Verdict.CRASH, "device probe after the call"),
        (cases.device_assert, Verdict.CRASH, "device-side assert"),
        (cases.hang, Verdict.HANG, "no answer within 15 s"),
        (cases.exhaust_memory, Verdict.OOM, "out of memory"),
    ],
)
def test_what_harms_a_context_ends_with_its_case(isolator, call, verdict, reason):
    outcome = isolator.run(call, limits=Limits(timeout_s=15))
    assert outcome.verdict is verdict, outcome
    assert reason in outcome.reason
    assert outcome.device_ok is True
    print(call.__name__, f"{outcome.wall_s:.1f} s", outcome.xids)
    after = isolator.run(cases.add, expect=float)
    assert (after.verdict, after.value) == (Verdict.OK, 16.0)


def test_peaks_of_this_gpu_can_be_believed(isolator):
    outcome = isolator.run(cases.peaks, limits=Limits(timeout_s=300), expect=Peaks)
    assert outcome.verdict is Verdict.OK, outcome
    print(outcome.value, f"{outcome.wall_s:.1f} s")
    assert 200 < outcome.value.memory_gb_s < 20_000
    assert outcome.value.tflop_s["bf16"] > outcome.value.tflop_s["fp32"] > 1
    assert outcome.value.method in ("cupti", "cuda_events")
