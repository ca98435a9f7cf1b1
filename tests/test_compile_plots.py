"""The picture of notebook 24 shows what the evidence says."""

import dataclasses

from nvfp4lab.kernels.compile_evidence import what_stands_out
from nvfp4lab.kernels.compile_plots import compile_grid
from nvfp4lab.records import Evidence, Number, Stack, Target, Verdict, WrongKind
from nvfp4lab.report.style import VERDICT_COLOURS


def row(subject: str, verdict: Verdict = Verdict.OK, numbers=(), **details) -> Evidence:
    reason, kind = ("" if verdict is Verdict.OK else "because"), (WrongKind.GARBAGE if verdict is Verdict.WRONG else None)
    return Evidence("compile", subject, Target("12.0"), Stack(), verdict, "again", reason, kind, tuple(numbers), details=details)


def test_cells_name_the_instruction_that_matters_and_show_the_worst_unit():
    packs = Number("fp4_conversions", 8, "")
    rows = [
        row("compile:m:u:sm_120a", tensor_instructions={"OMMA.SF.16864.F32.E2M1.E2M1.UE4M3.4X": 64, "HMMA.16816.F32": 1}),
        row("compile:m:u:sm_90a", tensor_instructions={"HMMA.16816.F32.BF16": 9}),
        row("compile:q:u:sm_120a", numbers=[packs], tensor_instructions={}),
        row("compile:q:v:sm_90a", Verdict.WRONG, tensor_instructions={}),
        row("compile:q:u:sm_90a", numbers=[packs], tensor_instructions={}),
        row("compile:q:u:sm_121a", Verdict.CRASH, tensor_instructions={}),
    ]
    figure = compile_grid(rows)
    [axes] = figure.axes
    assert {text.get_position(): text.get_text() for text in axes.texts} == {
        (0, 0): "OMMA\nE2M1",
        (1, 0): "HMMA\n16816.F32",
        (0, 1): "F2FP\nE2M1",
        (1, 1): "empty body",
        (2, 1): "crash",
    }
    faces = ["#{:02X}{:02X}{:02X}".format(*(round(255 * part) for part in patch.get_facecolor()[:3])) for patch in axes.patches]
    assert sorted(faces) == sorted(
        [VERDICT_COLOURS[Verdict.OK]] * 3 + [VERDICT_COLOURS[Verdict.WRONG], VERDICT_COLOURS[Verdict.CRASH]]
    )
    assert figure.alt.endswith("4 ok, 1 wrong, 1 crash")
    assert figure._repr_mimebundle_()[0]["image/png"].startswith(b"\x89PNG")


def test_a_kernel_without_a_product_says_so():
    without = row("compile:m:u:sm_120a", Verdict.CRASH, tensor_instructions={})
    said = dataclasses.replace(without, reason="k holds no tensor-core instruction: it ends without a product")
    assert [text.get_text() for text in compile_grid([said]).axes[0].texts] == ["no product"]


def test_what_shares_a_reason_stands_out_once():
    rows = [row("compile:m:u:sm_120a"), *(row(f"compile:m:{unit}:sm_90a", Verdict.CRASH) for unit in "uv")]
    assert what_stands_out(rows) == "crash        m: because\n    u:sm_90a, v:sm_90a\n    again"
    assert what_stands_out(rows[:1]) == ""
