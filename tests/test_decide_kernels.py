"""What kernels and `auto` add to a decision. Records are made by the very types that the stages write them with."""

import dataclasses
import json
from types import SimpleNamespace

import pytest

from nvfp4lab import cli
from nvfp4lab.decide import Question, decide
from nvfp4lab.kernels.cases import Case, CaseResult
from nvfp4lab.kernels.shapes import GemmShape, MoeShape
from nvfp4lab.kernels.sweep import case_hash
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Ledger, Number, Stack, Target, Verdict, WrongKind
from nvfp4lab.server import which_kernel
from nvfp4lab.server.arms import Arm
from nvfp4lab.source import routes_evidence
from nvfp4lab.source.routes_query import Hop, Query, Route

STACK = Stack(sglang="0.5.23", flashinfer="0.7.2", gpu="RTX PRO 6000", lab_commit="a")
SM120 = Target("12.0", present=True, name="RTX PRO 6000")
QUESTION = Question("12.0", "0.5.23", "0.7.2", model="M")
KERNELS_ONLY = "measured on this GPU (kernels only, not a server)"


def gemm(m: int) -> GemmShape:
    return GemmShape(m, 5120, 2048)


def kernel(backend, shape, ms=None, verdict=Verdict.OK, kind=None, probe="exact_t24", stack=STACK, **timed) -> Evidence:
    """The record of one kernel case. ms: (median, low, high)."""
    case = Case(backend, probe, shape, timed=ms is not None)
    numbers = (Number("median_ms", *ms[:1], "ms", *ms[1:], 50),) if ms else ()
    details = {"timing_method": "cupti", "cold_l2": True} | timed if ms else {}
    reason = "" if verdict is Verdict.OK else "why it failed"
    record = CaseResult(verdict, reason, kind, numbers, details).evidence(case, SM120, stack)
    return dataclasses.replace(record, details={**record.details, "case_hash": case_hash(case, stack)})


def arm(name, speed=None, verdict=Verdict.OK, kernels=(), stage="server", concurrency=None, **fields) -> Evidence:
    """The record of one server arm, or of its load. kernels: operation -> family its trace showed."""
    made = Arm(name=name, model=fields.pop("model", "M"), **fields)
    seen = [dataclasses.asdict(which_kernel.agreement(op, family, None, (family,))) for op, family in dict(kernels).items()]
    details = {"arm": made.model_dump(exclude_defaults=True)}
    details |= {"kernels": seen} if seen else {}
    details |= {"concurrency": concurrency, "input_tokens": 1024, "output_tokens": 64} if concurrency else {}
    numbers = (Number("output_tok_s", speed, "tok/s", speed * 0.98, speed * 1.02, 3),) if speed else ()
    reason = "" if verdict is Verdict.OK else "why it failed"
    kind = WrongKind.DEGRADED if verdict is Verdict.WRONG else None
    return Evidence(stage, f"arm:{name}", SM120, STACK, verdict, "again", reason, kind, numbers, details=details)


def routes(*made: Route) -> list[Evidence]:
    router = SimpleNamespace(reading=SimpleNamespace(version="0.5.23"), flashinfer_version="0.7.2")
    return routes_evidence.of_routes(made, Query("12.0", "modelopt_fp4", None), router, Params(sglang="0.5.23", flashinfer="0.7.2"))


def route(op, backend, *whys, final="flashinfer.mm_fp4", expected="works as far as source shows", when=()) -> Route:
    return Route(backend, op, dict(when), tuple(Hop("a.py", 1, why) for why in whys), (), final, expected)


def why_not(decision, op, backend) -> str:
    return next(row.why for row in decision.rejected if (row.op, row.backend) == (op, backend))


CUTLASS, CUDNN, MARLIN = "flashinfer.mm_fp4.cutlass", "flashinfer.mm_fp4.cudnn", "sglang.gptq_marlin_gemm"
TIMED = [
    kernel(CUTLASS, gemm(16), (0.020, 0.019, 0.021)),
    kernel(CUTLASS, gemm(64), (0.040, 0.039, 0.041)),
    kernel(CUDNN, gemm(16), (0.010, 0.0095, 0.0105)),
    kernel(CUDNN, gemm(64), (0.020, 0.019, 0.021)),
]


def test_without_a_server_the_fastest_right_kernel_is_named_and_said_to_be_no_server():
    decision = decide(QUESTION, TIMED)
    assert decision.command == "python -m sglang.launch_server --model-path M --fp4-gemm-backend flashinfer_cudnn"
    assert decision.confidence == KERNELS_ONLY
    assert "kernels only, no server" in decision.why
    assert "0.01414 ms [0.01344, 0.01485] over 2 cases (geometric mean) on RTX PRO 6000" in decision.why
    assert "2.00 times flashinfer_cudnn's" in why_not(decision, "fp4_gemm", "flashinfer_cutlass")


def test_kernels_are_ranked_over_the_cases_they_share():
    """Marlin's one fast case at another M, on which nobody else ran, does not make it the fastest."""
    elsewhere = kernel(MARLIN, gemm(1), (0.001, 0.001, 0.001))
    decision = decide(QUESTION, [*TIMED, elsewhere])
    assert decision.chosen == {"fp4_gemm": "flashinfer_cudnn"}
    assert "marlin was timed on other cases, or in another way, only" in decision.why
    other_clock = [kernel(MARLIN, gemm(m), (0.001, 0.001, 0.001), timing_method="cuda_events") for m in (16, 64)]
    assert decide(QUESTION, [*TIMED, *other_clock]).chosen == {"fp4_gemm": "flashinfer_cudnn"}


def test_one_shape_more_does_not_change_what_is_compared():
    more = kernel(CUTLASS, gemm(4096), (0.0001, 0.0001, 0.0001))
    decision = decide(QUESTION, [*TIMED, more])
    assert decision.chosen == {"fp4_gemm": "flashinfer_cudnn"}
    assert "over 2 cases" in decision.why


def test_kernel_times_whose_intervals_overlap_are_no_difference():
    near = [kernel(CUTLASS, gemm(m), (ms, 0.9 * ms, 1.2 * ms)) for m, ms in ((16, 0.0102), (64, 0.0204))]
    decision = decide(QUESTION, [*TIMED[2:], *near])
    assert decision.no_difference == ("--fp4-gemm-backend flashinfer_cutlass",)
    assert "no difference to flashinfer_cutlass" in decision.why
    assert why_not(decision, "fp4_gemm", "flashinfer_cutlass").startswith("no difference measured")


def test_right_kernels_without_a_time_are_not_ranked_by_the_alphabet():
    decision = decide(QUESTION, [kernel(CUTLASS, gemm(16)), kernel(CUDNN, gemm(16))])
    assert decision.command is None
    assert "not timed" in decision.why
    assert decide(QUESTION, [kernel(CUTLASS, gemm(16))]).chosen == {"fp4_gemm": "flashinfer_cutlass"}


FAILURES = [(Verdict.WRONG, WrongKind.NAN), (Verdict.WRONG, WrongKind.GARBAGE), (Verdict.CRASH, None), (Verdict.HANG, None)]


@pytest.mark.parametrize("probe", ["exact_t24", "realistic"])
@pytest.mark.parametrize(("verdict", "kind"), FAILURES)
def test_a_backend_whose_kernel_failed_here_is_rejected_with_that_record(verdict, kind, probe):
    failed = kernel(CUDNN, gemm(4096), verdict=verdict, kind=kind, probe=probe)
    decision = decide(QUESTION, [*TIMED, failed])
    assert decision.chosen == {"fp4_gemm": "flashinfer_cutlass"}
    rejected = next(row for row in decision.rejected if row.backend == "flashinfer_cudnn")
    assert failed.subject in rejected.why
    assert "why it failed" in rejected.why
    assert any(failed.repro in line for line in rejected.evidence)
    assert decide(QUESTION, [*TIMED[2:], failed]).command is None, "rejected, not only ranked behind"


def test_what_a_kernel_refuses_of_one_shape_is_no_failure_of_the_backend():
    for verdict in (Verdict.UNSUPPORTED, Verdict.OOM):
        assert decide(QUESTION, [*TIMED, kernel(CUDNN, gemm(3), verdict=verdict)]).chosen == {"fp4_gemm": "flashinfer_cudnn"}
    only = decide(QUESTION, [kernel(CUDNN, gemm(3), verdict=Verdict.UNSUPPORTED)])
    assert only.command is None
    assert why_not(only, "fp4_gemm", "flashinfer_cudnn").startswith("unsupported, measured on this GPU by a kernel run")


def test_less_exact_than_a_harder_probe_asks_ranks_behind_the_exact_and_is_told():
    harder = kernel(CUDNN, gemm(16), verdict=Verdict.WRONG, kind=WrongKind.DEGRADED, probe="exact_bf16")
    decision = decide(QUESTION, [*TIMED, harder])
    assert decision.chosen == {"fp4_gemm": "flashinfer_cutlass"}
    assert "exact_bf16" in why_not(decision, "fp4_gemm", "flashinfer_cudnn")
    alone = decide(QUESTION, [*TIMED[2:], harder])
    assert alone.chosen == {"fp4_gemm": "flashinfer_cudnn"}
    assert "exact_bf16" in alone.why
    same_probe = dataclasses.replace(kernel(CUDNN, gemm(1), verdict=Verdict.WRONG, kind=WrongKind.DEGRADED))
    assert decide(QUESTION, [*TIMED[2:], same_probe]).command is None


def test_source_that_refuses_the_flag_is_not_overruled_by_a_kernel_called_directly():
    refused = routes(route("fp4_gemm", "flashinfer_cudnn", expected="raises: ValueError: no"))
    decision = decide(QUESTION, [*TIMED, *refused])
    assert decision.chosen == {"fp4_gemm": "flashinfer_cutlass"}
    assert why_not(decision, "fp4_gemm", "flashinfer_cudnn").startswith("unsupported, read from source")
    assert any("called directly, was right" in line for line in decision.contradictions)


def test_a_flag_that_ends_in_another_kernel_is_not_judged_by_its_namesake():
    stray = routes(route("moe", "flashinfer_cutedsl", final="x.cutlass", expected="silently goes elsewhere: ends in x.cutlass"))
    moe = kernel("flashinfer.cute_dsl_fused_moe_nvfp4", MoeShape(16, 2048, 768, 128, 8), (1.0, 0.9, 1.1), probe="exact_moe")
    assert decide(QUESTION, [moe]).chosen == {"moe": "flashinfer_cutedsl"}
    assert decide(QUESTION, [moe, *stray]).command is None


def test_half_a_configuration_is_not_recommended():
    moe = routes(route("moe", "marlin", final="m"))
    decision = decide(QUESTION, [*TIMED, *moe])
    assert decision.command is None
    assert "moe: no backend was measured right here" in decision.why
    assert "flashinfer_cudnn is the fastest" in decision.why


def test_a_server_decides_the_speed_and_kernels_are_cited_beside_it():
    served = [
        arm("a", fp4_gemm_backend="flashinfer_cutlass"),
        arm("b", fp4_gemm_backend="flashinfer_cudnn"),
        arm("a", 2000.0, stage="load", concurrency=32, fp4_gemm_backend="flashinfer_cutlass"),
        arm("b", 1000.0, stage="load", concurrency=32, fp4_gemm_backend="flashinfer_cudnn"),
    ]
    decision = decide(QUESTION, [*TIMED, *served])
    assert decision.chosen == {"fp4_gemm": "flashinfer_cutlass"}
    assert decision.confidence == "measured on this GPU (kernel, load, server)"
    assert "concurrency 32, 1024 tokens in, 64 out" in decision.why
    assert any(line.startswith("kernels alone, fp4_gemm: flashinfer_cudnn is the fastest") for line in decision.beside)
    assert "kernel records of fp4_gemm flashinfer_cutlass here: 2 of 2 right" in decision.beside
    assert any(TIMED[0].repro in line for line in decision.evidence)


def test_a_right_kernel_without_a_server_does_not_outrank_a_server():
    decision = decide(QUESTION, [*TIMED, arm("a", fp4_gemm_backend="flashinfer_cutlass")])
    assert decision.chosen == {"fp4_gemm": "flashinfer_cutlass"}
    assert why_not(decision, "fp4_gemm", "flashinfer_cudnn").startswith(
        "its kernel is right here, but no server was started with it"
    )


def test_a_wrong_kernel_under_a_right_server_is_disputed_and_a_crash_is_not_forgiven():
    served = [arm("a", fp4_gemm_backend="flashinfer_cutlass"), arm("b", fp4_gemm_backend="marlin")]
    garbage = kernel(CUTLASS, gemm(16), verdict=Verdict.WRONG, kind=WrongKind.GARBAGE)
    both = decide(QUESTION, [*served, garbage])
    assert both.chosen == {"fp4_gemm": "marlin"}, "the undisputed one is preferred"
    alone = decide(QUESTION, [served[0], garbage])
    assert alone.chosen == {"fp4_gemm": "flashinfer_cutlass"}
    assert "disputed by its own kernels" in alone.confidence
    assert any(garbage.subject in line for line in alone.contradictions)
    for failed in ({"verdict": Verdict.CRASH}, {"verdict": Verdict.WRONG, "kind": WrongKind.NAN}):
        assert decide(QUESTION, [served[0], kernel(CUTLASS, gemm(16), **failed)]).command is None


def test_a_kernel_that_is_only_less_exact_contradicts_no_server_and_may_win_by_speed():
    """Marlin adds up in bf16 by design: a harder probe says so every time, and a server that is right and fastest stays first."""
    flags = {"a": {"fp4_gemm_backend": "flashinfer_cutlass"}, "b": {"fp4_gemm_backend": "marlin"}}
    served = [arm(name, fp4_gemm_backend=flags[name]["fp4_gemm_backend"]) for name in flags]
    loads = [arm(name, speed, stage="load", concurrency=8, **flags[name]) for name, speed in (("a", 100.0), ("b", 200.0))]
    kernels = [kernel(MARLIN, gemm(16), probe="exact_t8")]
    kernels += [kernel(MARLIN, gemm(16), verdict=Verdict.WRONG, kind=WrongKind.DEGRADED)]
    decision = decide(QUESTION, [*served, *loads, *kernels])
    assert decision.chosen == {"fp4_gemm": "marlin"}
    assert decision.contradictions == ()
    assert decision.confidence == "measured on this GPU (kernel, load, server)"
    assert any("less exact than some probes ask" in line and "exact_t24" in line for line in decision.beside)
    more = [
        kernel(MARLIN, gemm(33), verdict=Verdict.UNSUPPORTED),
        kernel(MARLIN, gemm(17), verdict=Verdict.WRONG, kind=WrongKind.DEGRADED),
    ]
    more += [kernel(MARLIN, gemm(18), verdict=Verdict.WRONG, kind=WrongKind.GARBAGE)]
    counted = "kernel records of fp4_gemm marlin here: 1 of 5 right, 1 failed, 2 less exact than asked, 1 unsupported"
    assert counted in decide(QUESTION, [served[1], *kernels, *more]).beside
    everywhere = [row for row in kernels if row.verdict is Verdict.WRONG]
    assert decide(QUESTION, [*served, *everywhere]).contradictions, "passing none of its probes is no mere lack of exactness"


def test_servers_are_compared_at_one_load():
    """The arm that was measured at a higher concurrency only is not faster for it."""
    flags = {"a": {"fp4_gemm_backend": "flashinfer_cutlass"}, "b": {"fp4_gemm_backend": "marlin"}}
    loads = [("a", 100.0, 1), ("a", 900.0, 32), ("b", 120.0, 1)]
    records = [arm(name, speed, stage="load", concurrency=at, **flags[name]) for name, speed, at in loads]
    decision = decide(QUESTION, records)
    assert decision.chosen == {"fp4_gemm": "marlin"}
    both = decide(QUESTION, [*records, arm("b", 500.0, stage="load", concurrency=32, **flags["b"])])
    assert both.chosen == {"fp4_gemm": "flashinfer_cutlass"}
    assert "at concurrency 1, 1024 tokens in, 64 out --fp4-gemm-backend marlin is faster: 120 tok/s" in both.why
    two_gpus = arm("b", 5000.0, stage="load", concurrency=32, tp=2, **flags["b"])
    assert decide(QUESTION, [*records[:2], arm("b", fp4_gemm_backend="marlin"), two_gpus]).chosen == {
        "fp4_gemm": "flashinfer_cutlass"
    }


def test_the_load_at_the_parallel_size_asked_about_decides():
    speeds = {("flashinfer_cutlass", 1): 900.0, ("flashinfer_cutlass", 2): 1000.0, ("marlin", 1): 500.0, ("marlin", 2): 2000.0}
    records = [
        arm(f"{backend}-{tp}", speed, stage="load", concurrency=8, tp=tp, fp4_gemm_backend=backend)
        for (backend, tp), speed in speeds.items()
    ]
    assert decide(QUESTION, records).chosen == {"fp4_gemm": "flashinfer_cutlass"}
    assert decide(dataclasses.replace(QUESTION, tp=2), records).chosen == {"fp4_gemm": "marlin"}


AUTO = routes(
    route("fp4_gemm", "auto", "the command line accepts auto", "auto becomes flashinfer_cutlass"),
    route("fp4_gemm", "flashinfer_cutlass"),
    route("fp4_gemm", "flashinfer_cudnn"),
)


def test_auto_is_shown_as_what_it_is_and_judged_by_its_evidence():
    decision = decide(QUESTION, [*AUTO, *TIMED])
    told = why_not(decision, "fp4_gemm", "auto")
    assert told.startswith("--fp4-gemm-backend auto = flashinfer_cutlass here (read from source)")
    assert "2.00 times flashinfer_cudnn's" in told
    wrong = decide(QUESTION, [*AUTO, *TIMED, kernel(CUTLASS, gemm(1), verdict=Verdict.CRASH)])
    assert "crash, measured on this GPU" in why_not(wrong, "fp4_gemm", "auto")
    chosen = decide(QUESTION, [*AUTO, *TIMED[:2]])
    assert "what is chosen, but by name" in why_not(chosen, "fp4_gemm", "auto")
    assert "not measured" not in told


def test_an_arm_without_the_flag_is_evidence_for_what_auto_became():
    left_open = arm("default", kernels={"fp4_gemm": "cutlass"})
    decision = decide(QUESTION, [*AUTO, left_open])
    assert decision.chosen == {"fp4_gemm": "flashinfer_cutlass"}
    assert decision.autos[0].endswith("(read from source, and a server's trace on this GPU shows its kernel)")
    assert decide(QUESTION, [left_open]).chosen == {"fp4_gemm": "flashinfer_cutlass"}, "the trace alone singles it out"
    assert decide(QUESTION, [*AUTO, arm("default")]).command is None, "no witness says that this model has such a layer"
    loaded = arm("default", 100.0, stage="load", concurrency=8)
    assert "100 tok/s" in decide(QUESTION, [*AUTO, left_open, loaded]).why


def test_a_trace_that_contradicts_the_reading_of_auto_comes_first():
    decision = decide(QUESTION, [*AUTO, arm("default", kernels={"fp4_gemm": "marlin"})])
    assert decision.contradictions[0].startswith("--fp4-gemm-backend auto is read from source as flashinfer_cutlass, yet")
    assert decision.chosen == {"fp4_gemm": "marlin"}


def test_auto_by_its_only_kernel_and_auto_that_cannot_be_told():
    by_call = routes(
        route("moe", "auto", final="k", when={"auto_left_unresolved": True}.items()), route("moe", "marlin", final="k")
    )
    assert decide(QUESTION, by_call).autos == ("--moe-runner-backend auto = marlin here (read from source)",)
    two = routes(route("moe", "auto", final="k"), route("moe", "marlin", final="k"), route("moe", "cutlass", final="k"))
    assert "auto becomes here is not known" in why_not(decide(QUESTION, two), "moe", "auto")
    raising = routes(route("fp4_gemm", "auto", "auto becomes flashinfer_cutlass", expected="raises: ValueError: no"))
    for more in ([], [arm("a", fp4_gemm_backend="flashinfer_cutlass")]):
        told = why_not(decide(QUESTION, [*raising, *more]), "fp4_gemm", "auto")
        assert told.startswith(
            "--fp4-gemm-backend auto = flashinfer_cutlass here (read from source): unsupported, read from source"
        )


def test_a_flag_that_reached_no_layer_of_the_arms_model_was_not_judged():
    vacuous = arm("moe", moe_runner_backend="marlin", kernels={"plain": "plain"})
    decision = decide(QUESTION, [vacuous])
    assert decision.command is None
    assert any("says nothing about the flag" in line for line in decision.contradictions)


def test_a_case_that_a_mended_lab_ran_again_counts_once_and_one_that_fails_twice_stays():
    timed_case = kernel(CUDNN, gemm(16), (0.01, 0.01, 0.01), verdict=Verdict.WRONG, kind=WrongKind.GARBAGE)
    wrong = dataclasses.replace(timed_case, numbers=())
    mended = kernel(CUDNN, gemm(16), (0.01, 0.01, 0.01), stack=dataclasses.replace(STACK, lab_commit="b"))
    assert decide(QUESTION, [wrong, mended]).chosen == {"fp4_gemm": "flashinfer_cudnn"}
    flaky = dataclasses.replace(mended, stack=STACK)
    assert decide(QUESTION, [wrong, flaky]).command is None


def test_what_was_built_for_the_card_is_told_and_recommends_nothing():
    built = Evidence(
        "compile",
        "compile:flashinfer.fp4_gemm_cutlass_sm120:bf16_128x128x256:sm_120a",
        Target("12.0"),
        Stack(flashinfer="0.7.2"),
        Verdict.OK,
        "nvfp4lab compile",
    )
    decision = decide(QUESTION, [*AUTO, built])
    assert decision.command is None
    assert "compiled for it" in why_not(decision, "fp4_gemm", "flashinfer_cutlass")


def test_the_terminal_says_it_in_words(tmp_path, capsys):
    Ledger(tmp_path / "ledger.jsonl").append(*AUTO, *TIMED)
    assert cli.main(["decide", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "kernels only, not a server" in told
    assert "not fp4_gemm auto: --fp4-gemm-backend auto = flashinfer_cutlass here" in told


def test_what_is_asked_by_hand_narrows_the_rest_of_the_question(tmp_path, capsys):
    """Most records are of a CPU with another SGLang; asked about 12.0, the versions of the records of 12.0 count."""
    older = Stack(sglang="0.5.17")
    h200 = [kernel(CUTLASS, gemm(m), (0.1, 0.1, 0.1), stack=older) for m in range(1, 13)]
    Ledger(tmp_path / "ledger.jsonl").append(*(dataclasses.replace(row, target=Target("9.0")) for row in h200), *TIMED)
    assert cli.main(["decide", str(tmp_path), "--cc", "12.0"]) == 0
    told = capsys.readouterr().out
    assert "--fp4-gemm-backend flashinfer_cudnn" in told
    assert "asked for: compute capability 12.0, SGLang 0.5.23, FlashInfer 0.7.2" in told
    assert "left out: 12 records" in told


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--cc", "12.0"), "compute capability 12.0, SGLang 0.5.23, FlashInfer of any version"),
        (("--sglang", "0.6.0"), "compute capability 9.0, SGLang 0.6.0, FlashInfer of any version"),
        (("--cc", "12.0", "--flashinfer", "0.9.1"), "compute capability 12.0, SGLang 0.5.23, FlashInfer 0.9.1"),
        ((), "compute capability 9.0, SGLang 0.5.23, FlashInfer 0.7.2"),
    ],
)
def test_what_is_asked_is_said_also_where_nothing_is_about_it(tmp_path, capsys, asked, told):
    Ledger(tmp_path / "ledger.jsonl").append(*(dataclasses.replace(row, target=Target("9.0")) for row in TIMED))
    assert cli.main(["decide", str(tmp_path), *asked]) == 0
    shown = capsys.readouterr().out
    assert f"asked for: {told}" in shown
    assert ("no recommendation" in shown) is bool(asked)


def test_a_capability_that_none_is_is_refused(tmp_path, capsys):
    Ledger(tmp_path / "ledger.jsonl").append(*TIMED)
    assert cli.main(["decide", str(tmp_path), "--cc", "90"]) == 2
    assert "--cc 90: needs a compute capability such as 9.0" in capsys.readouterr().err


def test_an_empty_run_is_answered_and_damaged_lines_are_counted(tmp_path, capsys):
    (tmp_path / "ledger.jsonl").write_text("torn {\n")
    assert cli.main(["decide", str(tmp_path), "--json"]) == 0
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert answer["command"] is None
    assert answer["why"].startswith("no evidence")
    assert "1 damaged line is left out" in shown.err


def test_the_command_has_the_parallel_size_that_was_served():
    served = arm("a", tp=4, fp4_gemm_backend="marlin")
    assert decide(QUESTION, [served]).command.startswith("python -m sglang.launch_server --model-path M --tp 4 ")
    both = [served, arm("b", tp=2, fp4_gemm_backend="marlin")]
    assert "--tp" not in decide(QUESTION, both).command
    assert "--tp 8" in decide(dataclasses.replace(QUESTION, tp=8), both).command


def test_two_products_of_one_capability_are_told_apart():
    other = dataclasses.replace(kernel(CUTLASS, gemm(16), (0.001, 0.001, 0.001)), target=Target("12.0", True, "RTX 5090"))
    decision = decide(QUESTION, [*TIMED[2:], other])
    assert decision.chosen == {"fp4_gemm": "flashinfer_cudnn"}, "not compared with the time on the other card"
    assert decision.beside == ("the evidence comes from 2 kinds of GPU: RTX 5090, RTX PRO 6000",)


def test_versions_that_the_question_leaves_open_are_told_when_they_mix():
    older = kernel(CUTLASS, gemm(16), (0.0001, 0.0001, 0.0001), stack=dataclasses.replace(STACK, flashinfer="0.6.5"))
    anything = dataclasses.replace(QUESTION, flashinfer=None)
    mixed = decide(anything, [older, *TIMED[2:]])
    assert mixed.beside == ("the evidence comes from 2 versions of FlashInfer: 0.6.5, 0.7.2",)
    assert mixed.chosen == {"fp4_gemm": "flashinfer_cudnn"}, "not compared with the time under another FlashInfer"
    assert decide(QUESTION, [*TIMED, older]).beside == ()


def test_an_audit_of_another_checkpoint_makes_nothing_moot():
    def audit(model, *flags):
        return Evidence(
            "checkpoint", f"checkpoint:{model}", SM120, STACK, Verdict.OK, "again", details={"moot_flags": dict.fromkeys(flags, "")}
        )

    dense, moe = audit("dense", "--moe-runner-backend"), audit("M", "--fp4-gemm-backend")
    assert decide(QUESTION, [*TIMED, dense]).moot == ("--moe-runner-backend touches no layer of this checkpoint",)
    assert decide(QUESTION, [*TIMED, dense, moe]).moot == ("--fp4-gemm-backend touches no layer of this checkpoint",)
    assert decide(dataclasses.replace(QUESTION, model="other"), [*TIMED, dense, moe]).moot == ()


def test_an_arm_whose_greedy_answers_differ_when_asked_twice_is_said_to_be_unsteady():
    """Seen on an H200: Marlin's MoE kernel adds partial sums up by atomics, in whatever order they come."""

    def beside(*alike) -> str:
        served = arm("one", fp4_gemm_backend="flashinfer_cudnn")
        return "; ".join(
            decide(
                QUESTION, [dataclasses.replace(served, numbers=(Number("same_answer_twice", *alike, "1", 0.5, 1.0, 44),))]
            ).beside
        )

    assert "arm one is not deterministic: 27% of 44 greedy answers differed" in beside(32 / 44)
    assert "deterministic" not in beside(1.0)
