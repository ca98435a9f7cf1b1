"""Page 40 says first what contradicts itself, then what to launch; no cell mixes ways of knowing."""

from matplotlib.colors import to_hex

from nvfp4lab.decide import decide, display
from nvfp4lab.records import Verdict, WrongKind
from nvfp4lab.report.style import VERDICT_COLOURS
from test_decide_kernels import CUTLASS, QUESTION, TIMED, arm, gemm, kernel, routes

GARBAGE = kernel(CUTLASS, gemm(16), verdict=Verdict.WRONG, kind=WrongKind.GARBAGE)
SERVED = arm("a", fp4_gemm_backend="flashinfer_cutlass")


def test_contradictions_stand_before_the_command_and_html_is_escaped():
    decision = decide(QUESTION, [SERVED, GARBAGE])
    told = display.headline(decision)
    assert told.index("Contradiction:") < told.index('<pre class="lab-command">python -m sglang.launch_server')
    hostile = decide(QUESTION, [arm("a", fp4_gemm_backend="<script>alert(1)</script>")])
    assert "<script>" not in display.headline(hostile) + display.why_not(hostile)


def test_the_picture_keeps_kernels_and_servers_apart():
    made = display.draw(decide(QUESTION, [SERVED, GARBAGE]))
    colours = [to_hex(bar.get_facecolor()).upper() for bar in made.axes[0].patches]
    wrong, ok, nothing = (VERDICT_COLOURS[verdict] for verdict in (Verdict.WRONG, Verdict.OK, Verdict.NOT_RUN))
    assert colours == [nothing, nothing, wrong, ok]  # read, compiled, kernels, servers
    assert [text.get_text() for text in made.axes[0].texts] == ["chosen"]
    assert "fp4_gemm  flashinfer_cutlass: ok, measured on this GPU" in made.alt


def test_a_backend_with_many_records_shows_the_decisive_one_and_counts_the_rest():
    many = [kernel(CUTLASS, gemm(m), (1.0, 0.9, 1.1)) for m in range(1, 40)]
    decision = decide(QUESTION, [*many, kernel(CUTLASS, gemm(77), verdict=Verdict.CRASH), *TIMED[2:]])
    told = display.why_not(decision)
    assert "m77n5120k2048 crash" in told.replace("<wbr>", "")
    (row,) = [row for row in decision.rejected if row.backend == "flashinfer_cutlass"]
    assert len(row.evidence) >= 40
    assert f"and {len(row.evidence) - display.SHOWN_EVIDENCE} more" in told


def test_a_decision_without_evidence_can_be_drawn_and_told():
    for decision in (decide(QUESTION, []), decide(QUESTION, routes())):
        assert "No recommendation" in display.headline(decision)
        assert display.draw(decision).axes
        assert "<tbody></tbody>" in display.why_not(decision)
