"""What notebooks 22 and 23 tell: failures with their repro line, refusals, speeds, and disagreement with the source."""

import dataclasses

import pytest
from matplotlib.colors import to_rgba

from nvfp4lab.kernels import case_plots, case_report
from nvfp4lab.kernels.case_expectations import mismatches
from nvfp4lab.kernels.cases import Case, CaseResult
from nvfp4lab.kernels.shapes import GemmShape
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Ledger, Number, Stack, Target, Verdict, WrongKind
from nvfp4lab.report.style import VERDICT_COLOURS

HERE, STACK = Target("9.0", True), Stack(sglang="0.5.17")


def row(backend: str, verdict: Verdict, m: int = 16, ms: float | None = None, rates=(2.0, 500.0, 0.5), **details) -> Evidence:
    """rates: TFLOP/s, GB/s, fraction of the roofline (None: no peaks)."""
    numbers = ()
    if ms:
        named = zip(("tflop_s", "gb_s", "roofline_fraction"), ("TFLOP/s", "GB/s", ""), rates, strict=True)
        numbers = (Number("median_ms", ms, "ms", ms * 0.9, ms * 1.1, 50), Number("power_w", 300.0, "W"))
        numbers += tuple(Number(name, rate, unit) for name, unit, rate in named if rate is not None)
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


def test_what_fails_alike_at_many_shapes_is_one_story():
    wrong = [row("a", Verdict.WRONG, m=m) for m in (1, 2, 3)]
    told = case_report.failures([*wrong, row("b", Verdict.WRONG), row("a", Verdict.CRASH)])
    stories = told.split("\n\n")
    assert len(stories) == 3 and all(story.count("nvfp4lab kernels --case") == 1 for story in stories)
    assert stories[0].endswith("  and at m2n64k64, m3n64k64")


def test_refusals_and_notes_are_told_once_for_each_backend():
    assert case_report.refusals([*ROWS, *ROWS]).count("its own words") == 1
    assert case_report.notes(ROWS).splitlines() == ["d: follows the convention of x to the bit", "d: rounds"]


def test_a_refusal_of_some_shapes_is_not_told_as_one_of_all():
    some = [row("a", Verdict.OK), row("a", Verdict.OK, m=32), row("a", Verdict.UNSUPPORTED, m=33), *ROWS[2:3]]
    of_a, of_b = case_report.refusals(some).splitlines()
    assert "at 1 of its 3 shapes (m33n64k64): its own words" in of_a and "shapes" not in of_b


def test_each_shape_is_refused_for_its_own_reason():
    """Marlin refused an intermediate size of 160 and a hidden size of 2880; one sentence for both named the wrong cause."""
    first, second = row("a", Verdict.UNSUPPORTED, m=33), row("a", Verdict.UNSUPPORTED, m=34)
    told = case_report.refusals([row("a", Verdict.OK), first, dataclasses.replace(second, reason="MKN = [66, 1408, 2880]")])
    assert [line.split("its 3 shapes ")[1] for line in told.splitlines()] == [
        "(m33n64k64): its own words",
        "(m34n64k64): MKN = [66, 1408, 2880]",
    ]


def test_only_right_and_timed_cases_have_a_speed():
    speeds = case_report.speeds(ROWS)
    assert list(speeds["backend"]) == ["a"] and speeds["median_ms"][0] == 1.0 and speeds["power_w"][0] == 300.0
    assert len(case_report.speeds(ROWS[1:])) == 0


def test_it_is_told_how_many_were_timed_and_why_not_by_a_better_method():
    timed = [row("a", Verdict.OK, m, 1.0, timing_method="cupti_graph") for m in (1, 2)]
    fallen = row("b", Verdict.OK, 1, 1.0, timing_method="cupti", timing_note="The replay could not be timed: why.")
    told = case_report.how_timed([*timed, fallen, *ROWS[1:]])
    assert told == "3 of 7 cases were timed: 2 by cupti_graph, 1 by cupti.\nThe replay could not be timed: why."
    assert case_report.how_timed(ROWS[1:]).startswith("No case was timed")


@pytest.mark.parametrize("rows", [ROWS, ROWS[2:3]])
def test_pictures_draw_what_there_is(rows):
    grid = case_plots.verdict_grid(rows)
    assert [label.get_text() for label in grid.axes[0].get_yticklabels()] == list(dict.fromkeys(map(case_report.backend_of, rows)))
    assert "1 unsupported" in grid.alt


def cells(picture) -> list[tuple]:
    """(backend, shape, verdict) by the colours of the cells."""
    axes, colours = picture.axes[0], {to_rgba(colour): verdict for verdict, colour in VERDICT_COLOURS.items()}
    shapes, names = ([label.get_text() for label in of()] for of in (axes.get_xticklabels, axes.get_yticklabels))
    return [
        (names[round(cell.get_y() + 0.5)], shapes[round(cell.get_x() + 0.5)], colours[cell.get_facecolor()])
        for cell in axes.patches
    ]


def test_the_worst_verdict_of_a_shape_is_shown_and_how_many_were_right():
    both = [
        row("a", Verdict.OK),
        row("a", Verdict.WRONG),
        row("a", Verdict.OK),
        row("a", Verdict.OK, m=32),
        row("b", Verdict.CRASH),
    ]
    grid = case_plots.verdict_grid(both)
    assert cells(grid) == [
        ("a", "m16n64k64", Verdict.WRONG),
        ("a", "m32n64k64", Verdict.OK),
        ("b", "m16n64k64", Verdict.CRASH),
    ]
    assert [text.get_text() for text in grid.axes[0].texts] == ["2/3"]


def test_many_shapes_are_wrapped_and_none_is_left_out():
    """A line names only the backends that were asked there."""
    many = [row("a", Verdict.WRONG if m == 45 else Verdict.OK, m=m) for m in range(1, 46)] + [row("b", Verdict.UNSUPPORTED, m=1)]
    grid = case_plots.verdict_grid(many)
    labels = [[label.get_text() for label in axes.get_yticklabels()] for axes in grid.axes]
    assert labels == [["a", "b"], ["a"], ["a"]]
    shown = [label.get_text() for axes in grid.axes for label in axes.get_xticklabels()]
    assert shown == [f"m{m}n64k64" for m in range(1, 46)]
    assert grid.axes[2].patches[-1].get_facecolor() == to_rgba(VERDICT_COLOURS[Verdict.WRONG])


def lines(picture) -> dict[str, tuple]:
    """The lines without markers, by label."""
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for line in picture.axes[0].lines
        if "oof" in line.get_label()
    }


def test_the_roof_has_its_ridge_where_the_card_has_it_not_at_a_case():
    """1000 GB/s and 100 TFLOP/s: the ridge is at 100 FLOP/B, between a case at 10 and one at 1000."""
    bf16 = {"arithmetic": "bf16"}
    bound_by_memory = row("a", Verdict.OK, 1, 1.0, (5.0, 500.0, 0.5), roofline=bf16 | {"bound": "memory"})
    bound_by_compute = row("a", Verdict.OK, 64, 1.0, (25.0, 25.0, 0.25), roofline=bf16 | {"bound": "compute"})
    roofs = lines(case_plots.roofline(case_report.speeds([bound_by_memory, bound_by_compute])))
    assert list(roofs) == ["roofline of bf16, measured here"]
    x, y = roofs["roofline of bf16, measured here"]
    assert (x, y) == (pytest.approx([10.0, 100.0, 1000.0]), pytest.approx([10.0, 100.0, 100.0]))
    x, y = lines(case_plots.roofline(case_report.speeds([bound_by_memory] * 2)))["roofline of bf16, measured here"]
    assert (x, y) == (pytest.approx([10.0]), pytest.approx([10.0]))  # no ceiling is known


def test_times_without_peaks_are_points_without_a_roof():
    picture = case_plots.roofline(case_report.speeds([row("a", Verdict.OK, ms=1.0, rates=(5.0, 500.0, None))]))
    assert lines(picture) == {} and len(picture.axes[0].containers) == 1


def test_points_of_two_methods_are_told_apart():
    mixed = [row("a", Verdict.OK, m, 1.0, timing_method=method) for m, method in ((1, "cupti_graph"), (2, "cuda_events"))]
    legend = [text.get_text() for text in case_plots.roofline(case_report.speeds(mixed)).axes[0].get_legend().get_texts()]
    assert legend == ["a (cupti_graph)", "a (cuda_events)"]


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


def test_a_refusal_of_one_shape_contradicts_no_reading():
    rows = [row("sglang.gptq_marlin_gemm", Verdict.UNSUPPORTED), row("sglang.gptq_marlin_gemm", Verdict.OK, m=32)]
    reading = source("marlin", Verdict.NOT_RUN)
    assert mismatches(rows, [reading]) == []
    assert len(mismatches(rows[:1], [reading])) == 1
    assert len(mismatches([*rows, row("sglang.gptq_marlin_gemm", Verdict.HANG)], [reading])) == 1


def test_without_a_reading_the_notebook_says_how_to_get_one(tmp_path):
    told = case_report.beside_source(Params(run_dir=str(tmp_path)), ROWS)
    assert "notebook 10" in told and str(tmp_path) not in told


def test_in_a_batch_the_reading_is_that_of_another_notebook(tmp_path, monkeypatch):
    monkeypatch.setattr(case_report, "here", lambda: HERE)
    own, other = (tmp_path / "pieces" / name for name in ("a1.attempt-0", "b2"))
    for folder in (own, other):
        folder.mkdir(parents=True)
    Ledger(other / "ledger.jsonl").append(source("marlin", Verdict.UNSUPPORTED))
    ran = [row("sglang.gptq_marlin_gemm", Verdict.OK)]
    assert "--fp4-gemm-backend marlin" in case_report.beside_source(Params(run_dir=str(own)), ran)
