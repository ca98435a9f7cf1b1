"""bench/marlin_reductions.py without a GPU: what it forces is forced and given back, and no row is blamed for another."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

from nvfp4lab.kernels.cases import CaseResult
from nvfp4lab.records import Verdict

BENCH = Path(__file__).parents[1] / "bench" / "marlin_reductions.py"


@pytest.fixture
def bench():
    spec = importlib.util.spec_from_file_location("bench_marlin_reductions", BENCH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def sglang(monkeypatch):
    """The two modules of SGLang that the bench reaches into, as far as it does."""
    moe, dense = types.ModuleType("fused_marlin_moe"), types.ModuleType("marlin_utils_fp4")
    moe.moe_wna16_marlin_gemm = lambda x, **named: named
    dense.should_use_atomic_add_reduce = lambda **_: "as SGLang would"
    for folder, module in (("sglang.srt.layers.moe.fused_moe_triton", moe), ("sglang.srt.layers.quantization", dense)):
        package = types.ModuleType(folder)
        setattr(package, module.__name__, module)
        monkeypatch.setitem(sys.modules, folder, package)
    return moe, dense


def test_reductions_are_forced_as_long_as_they_are_asked_for(bench, sglang):
    moe, dense = sglang
    call = {"use_atomic_add": True, "use_fp32_reduce": True}
    seen = {}
    for words, forced in bench.ways_of(bench.MOE).items():
        with forced:
            seen[words] = moe.moe_wna16_marlin_gemm(0, **call)
    assert seen == {
        bench.AS_CALLED: call,
        "fp32, no atomics": call | {"use_atomic_add": False},
        "bf16, no atomics": {"use_atomic_add": False, "use_fp32_reduce": False},
    }
    assert moe.moe_wna16_marlin_gemm(0, **call) == call
    answers = []
    for forced in bench.ways_of(bench.DENSE).values():
        with forced:
            answers.append(dense.should_use_atomic_add_reduce(m=1, n=1, k=1))
    assert answers == ["as SGLang would", True, False] and dense.should_use_atomic_add_reduce() == "as SGLang would"


def test_a_crash_is_a_row_and_a_lost_device_ends_the_rows(bench, sglang, monkeypatch):
    answers = iter([CaseResult(Verdict.OK), RuntimeError("CUDA error"), CaseResult(Verdict.OK)])

    def run_case(case):
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bench.cases, "run_case", run_case)
    found = [row["verdict"] for row in bench.rows(bench.DENSE, bench.DENSE_SHAPES[0], "exact_t8", False)]
    assert found == ["ok", "crash", "ok"]
    answers = iter([RuntimeError("CUDA error"), CaseResult(Verdict.OK)])
    monkeypatch.setattr(bench.isolate_worker, "probe_own_context", lost)
    rows = bench.rows(bench.DENSE, bench.DENSE_SHAPES[0], "exact_t8", False)
    assert next(rows)["verdict"] == "crash"
    with pytest.raises(RuntimeError, match="illegal memory"):
        next(rows)
