"""The pictures of stage 2 show what the evidence says."""

from nvfp4lab.kernels import plots
from nvfp4lab.records import Evidence, Number, Stack, Target, Verdict, WrongKind
from nvfp4lab.report.style import VERDICT_COLOURS


def row(subject: str, verdict: Verdict = Verdict.OK, numbers=(), **details) -> Evidence:
    reason, kind = ("" if verdict is Verdict.OK else "because"), (WrongKind.NAN if verdict is Verdict.WRONG else None)
    return Evidence("kernel", subject, Target("12.0"), Stack(), verdict, "again", reason, kind, tuple(numbers), details=details)


def cells(figure) -> dict[tuple[float, float], str]:
    """Centre of each cell -> its text."""
    return {text.get_position(): text.get_text() for text in figure.axes[0].texts}


def test_a_grid_shows_the_worst_of_what_happened_in_a_cell():
    rows = [row("gemm:a:x:m1", Verdict.WRONG), row("gemm:a:y:m1"), row("gemm:b:x:m1", Verdict.UNSUPPORTED), row("gemm:b:x:m2")]
    figure = plots.verdict_grid(rows, lambda one: one.subject.split(":")[1], lambda one: one.subject.split(":")[3])
    assert cells(figure) == {(0, 0): "wrong", (0, 1): "unsupported", (1, 1): "ok"}
    faces = {patch.get_facecolor()[:3] for patch in figure.axes[0].patches}
    expected = {VERDICT_COLOURS[verdict] for verdict in (Verdict.WRONG, Verdict.UNSUPPORTED, Verdict.OK)}
    assert {"#{:02X}{:02X}{:02X}".format(*(round(255 * part) for part in face)) for face in faces} == expected
    assert figure.alt.endswith("2 ok, 1 wrong, 1 unsupported")


def test_compile_cells_name_the_instruction_that_matters():
    packs = Number("fp4_conversions", 8, "")
    rows = [
        row("compile:m:u:sm_120a", tensor_instructions={"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 64, "HMMA.16816.F32": 1}),
        row("compile:m:u:sm_90a", tensor_instructions={"HMMA.16816.F32.BF16": 9}),
        row("compile:q:u:sm_120a", numbers=[packs], tensor_instructions={}),
        row("compile:q:u:sm_90a", Verdict.WRONG, tensor_instructions={}),
    ]
    assert cells(plots.compile_grid(rows)) == {
        (0, 0): "OMMA\nE2M1",
        (1, 0): "HMMA\n16816.F32",
        (0, 1): "F2FP\nE2M1",
        (1, 1): "empty body",
    }


def test_the_roofline_leaves_out_what_has_no_time():
    speed = [Number("tflop_s", 5.0, "TFLOP/s", 4.0, 7.0), Number("flops", 2e9, "FLOP"), Number("min_bytes", 1e8, "B")]
    peaks = row("peaks:cuda", numbers=[Number("peak_memory_gb_s", 4000.0, "GB/s"), Number("peak_bf16_tflop_s", 800.0, "TFLOP/s")])
    figure = plots.roofline([peaks, row("gemm:a:x:m1", numbers=speed), row("gemm:b:x:m1", Verdict.CRASH)])
    [axes] = figure.axes
    [points] = [container for container in axes.containers if container.get_label() == "a"]
    assert points.lines[0].get_xydata().tolist() == [[20.0, 5.0]]
    [roof] = [line for line in axes.lines if line.get_color() == "#555555"]
    assert roof.get_xydata().tolist() == [[10.0, 40.0], [200.0, 800.0], [400.0, 800.0]]
    assert "b" not in axes.get_legend_handles_labels()[1]
