"""What notebooks 22 and 23 tell: failures with their repro line, refusals, speeds, and disagreement with the source."""

import pytest

from nvfp4lab.kernels import case_plots, case_report
from nvfp4lab.kernels.case_expectations import mismatches
from nvfp4lab.kernels.cases import Case, CaseResult
from nvfp4lab.kernels.shapes import GemmShape
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Number, Stack, Target, Verdict, WrongKind

HERE, STACK = Target("9.0", True), Stack(sglang="0.5.17")


def row(backend: str, verdict: Verdict, m: int = 16, ms: float | None = None, **details) -> Evidence:
    numbers = ()
    if ms:
        rates = (Number("tflop_s", 2.0, "TFLOP/s"), Number("gb_s", 500.0, "GB/s"), Number("roofline_fraction", 0.5, ""))
        numbers = (Number("median_ms", ms, "ms", ms * 0.9, ms * 1.1, 50), *rates)
    kind = WrongKind.GARBAGE if verdict is Verdict.WRONG else None
    result = CaseResult(verdict, "" if verdict is Verdict.OK else "its own words", kind, numbers, details)
    return result.evidence(Case(backend, "exact_t24", GemmShape(m, 64, 64), source="x"), HERE, STACK)


def source(value: str, verdict: Verdict, cc: str = "9.0", sglang: str = "0.5.17") -> Evidence:
    return Evidence(
        "source", f"fp4_gemm:{value}:modelopt_fp4", Target(cc), Stack(sglang=sglang), verdict, "r", "read", details={"when": {}}
    )


ROWS = [
    row("a", Verdict.OK, ms=1.0),
    row("a", Verdict.WRONG, m=32),
    row("b", Verdict.UNSUPPORTED),
    row("c", Verdict.CRASH),
    row("d", Verdict.OK, note="follows the convention of x to the bit", conventions=["rounds"]),
]


def test_failures_carry_reason_and_repro():
    told = case_report.failures(ROWS)
    assert told.count("nvfp4lab kernels --case") == 2 and "wrong garbage" in told and "crash" in told
    assert case_report.failures(ROWS[:1]) == "Nothing failed."


def test_refusals_and_notes_are_told_once_for_each_backend():
    assert case_report.refusals([*ROWS, *ROWS]).count("its own words") == 1
    assert case_report.notes(ROWS).splitlines() == ["d: follows the convention of x to the bit", "d: rounds"]


def test_only_right_and_timed_cases_have_a_speed():
    speeds = case_report.speeds(ROWS)
    assert list(speeds["backend"]) == ["a"] and speeds["median_ms"][0] == 1.0


@pytest.mark.parametrize("rows", [ROWS, ROWS[2:3]])
def test_pictures_draw_what_there_is(rows):
    grid = case_plots.verdict_grid(rows)
    assert [label.get_text() for label in grid.axes[0].get_yticklabels()] == list(dict.fromkeys(map(case_report.backend_of, rows)))
    assert case_plots.roofline(case_report.speeds(rows)).axes


def test_the_worst_verdict_of_a_shape_is_shown():
    both = [row("a", Verdict.OK), row("a", Verdict.WRONG)]
    [mesh] = case_plots.verdict_grid(both).axes[0].collections
    assert mesh.get_array().flatten()[0] == list(case_plots.VERDICT_COLOURS).index(Verdict.WRONG)


@pytest.mark.parametrize(
    ("kernel", "reading", "count"),
    [
        (row("flashinfer.mm_fp4.cutlass", Verdict.OK), source("flashinfer_cutlass", Verdict.UNSUPPORTED), 1),
        (row("flashinfer.mm_fp4.cutlass", Verdict.UNSUPPORTED), source("flashinfer_cutlass", Verdict.UNSUPPORTED), 0),
        (row("sglang.gptq_marlin_gemm", Verdict.CRASH), source("marlin", Verdict.NOT_RUN), 1),
        (row("sglang.gptq_marlin_gemm", Verdict.OK), source("marlin", Verdict.NOT_RUN), 0),
        (row("sglang.gptq_marlin_gemm", Verdict.NOT_RUN), source("marlin", Verdict.NOT_RUN), 0),
        (row("sglang.gptq_marlin_gemm", Verdict.CRASH), source("marlin", Verdict.NOT_RUN, cc="12.0"), 0),
        (row("sglang.gptq_marlin_gemm", Verdict.CRASH), source("marlin", Verdict.NOT_RUN, sglang="0.5.9"), 0),
        (row("flashinfer.mm_fp4.b12x", Verdict.CRASH), source("marlin", Verdict.NOT_RUN), 0),
    ],
)
def test_source_and_run_are_set_beside_each_other(kernel, reading, count):
    found = mismatches([kernel], [reading])
    assert len(found) == count
    if count:
        assert "--fp4-gemm-backend" in str(found[0]) and str(kernel.verdict) in str(found[0])


def test_without_a_reading_the_notebook_says_how_to_get_one(tmp_path):
    assert "notebook 10" in case_report.beside_source(Params(run_dir=str(tmp_path)), ROWS)
