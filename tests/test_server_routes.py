"""Arms ask stage 1 about themselves on the SGLang that is installed, and a refusal spares a start."""

import importlib.util

import pytest

from nvfp4lab import params, stack
from nvfp4lab.records import Target, Verdict
from nvfp4lab.server import arms_plan, arms_routes
from nvfp4lab.server.arms import Arm
from nvfp4lab.source.routes_query import Query

ARMS = [
    Arm(name="marlin", model="fp4", fp4_gemm_backend="marlin"),
    Arm(name="cutlass", model="fp4", fp4_gemm_backend="flashinfer_cutlass"),
    Arm(name="bf16", model="bf16"),
]


def test_without_a_gpu_nothing_is_asked(monkeypatch, tmp_path):
    monkeypatch.setattr(stack, "here", lambda: Target("cpu", True))
    assert arms_routes.read(ARMS, params.check({"run_dir": str(tmp_path)}, "test")) == []


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed")
def test_on_an_h200_a_flashinfer_arm_is_not_started(monkeypatch, tmp_path):
    """SGLang refuses FlashInfer's dense FP4 below SM100, whatever its version: that start is spared."""
    monkeypatch.setattr(stack, "here", lambda: Target("9.0", True))
    monkeypatch.setattr(
        arms_routes, "_query", lambda arm, cc: Query(cc, model_arch="MistralForCausalLM") if arm.model == "fp4" else None
    )
    records = arms_routes.read(ARMS, params.check({"run_dir": str(tmp_path)}, "test"))
    told = {record.subject: record.verdict for record in records if record.subject.startswith("fp4_gemm")}
    assert told == {
        "fp4_gemm:marlin:modelopt_fp4": Verdict.NOT_RUN,
        "fp4_gemm:flashinfer_cutlass:modelopt_fp4": Verdict.UNSUPPORTED,
    }
    refusals = arms_routes.refusals_of(ARMS, records, "9.0", stack.capture().sglang)
    planned = arms_plan.plan(ARMS, 8, refusals)
    assert [item.arm.name for item in planned if item.start] == ["marlin", "bf16"]
    assert "SM100" in planned[1].reason
