"""A decision is made from what was measured right here, says why not for the rest, and never without evidence."""

import dataclasses
import html
import json

import pytest

from nvfp4lab import cli, field_reports, params
from nvfp4lab.commands.decide import lines
from nvfp4lab.decide import Question, decide, display
from nvfp4lab.decide.gather import question_of
from nvfp4lab.decide.question import asked_by, backends_of
from nvfp4lab.records import Evidence, Ledger, Number, Stack, Target, Verdict, WrongKind

STACK = Stack(sglang="0.5.9", flashinfer="0.6.5")
SM120 = Target("12.0", present=True, name="RTX PRO 6000")
QUESTION = Question("12.0", "0.5.9", "0.6.5", model="Qwen3.5-397B-A17B-NVFP4", tp=4)


def record(stage, subject, verdict=Verdict.OK, reason="", **changes) -> Evidence:
    values = {"target": SM120, "stack": STACK, "repro": f"nvfp4lab again {subject}"} | changes
    kind = WrongKind.GARBAGE if verdict is Verdict.WRONG else None
    return Evidence(stage, subject, verdict=verdict, kind=kind, reason=reason or ("" if verdict is Verdict.OK else "why"), **values)


def arm(moe, gemm, verdict=Verdict.OK, reason="", speed=None, stage="server", **changes) -> Evidence:
    numbers = (Number("output_tok_s", *speed),) if speed else ()
    details = {"arm": {"moe_runner_backend": moe, "fp4_gemm_backend": gemm}}
    return record(stage, f"arm:{moe}+{gemm}", verdict, reason, numbers=numbers, details=details, **changes)


READ = [
    record("source", "moe:flashinfer_trtllm:modelopt_fp4", Verdict.UNSUPPORTED, "capability gate excludes 12.0"),
    record("source", "moe:flashinfer_cutlass:modelopt_fp4", Verdict.NOT_RUN, "works as far as source shows"),
    record("source", "moe:flashinfer_cutedsl:modelopt_fp4", Verdict.NOT_RUN, "works as far as source shows"),
    record("source", "fp4_gemm:flashinfer_cudnn:modelopt_fp4", Verdict.NOT_RUN, "works as far as source shows"),
    record("source", "fp4_gemm:flashinfer_trtllm:modelopt_fp4", Verdict.UNSUPPORTED, "capability gate excludes 12.0"),
]
RECORDED = [
    record("kernel", "moe:flashinfer_cutlass:modelopt_fp4"),
    record("kernel", "fp4_gemm:flashinfer_cudnn:modelopt_fp4"),
    record("kernel", "moe:flashinfer_cutedsl:modelopt_fp4", Verdict.CRASH, "illegal memory access"),
    record("kernel", "moe:flashinfer_trtllm:modelopt_fp4", Verdict.WRONG, "expert 3, row 0 is NaN"),
    arm("flashinfer_cutlass", "flashinfer_cudnn"),
    arm("flashinfer_trtllm", "flashinfer_cudnn", Verdict.WRONG, "says !!!!"),
    arm("flashinfer_cutedsl", "flashinfer_cudnn", Verdict.CRASH, "died at the first request"),
]


def test_the_recorded_stack_arrives_at_the_flags_that_work():
    decision = decide(QUESTION, READ + RECORDED)
    assert decision.chosen == {"moe": "flashinfer_cutlass", "fp4_gemm": "flashinfer_cudnn"}
    assert decision.command.endswith("--tp 4 --moe-runner-backend flashinfer_cutlass --fp4-gemm-backend flashinfer_cudnn")
    assert "measured on this GPU" in decision.confidence
    reasons = {(row.op, row.backend): row.why for row in decision.rejected}
    assert "expert 3" in reasons["moe", "flashinfer_trtllm"]
    assert "illegal memory access" in reasons["moe", "flashinfer_cutedsl"]
    assert "read from source" in reasons["fp4_gemm", "flashinfer_trtllm"]
    assert set(decision.expires_with) >= {"sglang", "flashinfer"}


def test_source_alone_rules_out_and_recommends_nothing():
    decision = decide(QUESTION, READ)
    assert decision.command is None
    assert decision.chosen == {}
    assert "needs a card" in decision.why
    reasons = {(row.op, row.backend): row.why for row in decision.rejected}
    assert reasons["moe", "flashinfer_trtllm"].startswith("unsupported, read from source")
    assert reasons["moe", "flashinfer_cutlass"].startswith("not ruled out, not measured")


def test_no_evidence_no_recommendation():
    decision = decide(QUESTION, [])
    assert decision.command is None
    assert decision.why.startswith("no evidence")


def test_evidence_of_another_stack_or_gpu_does_not_count():
    other_stack = [record("kernel", "moe:marlin:modelopt_fp4", stack=Stack(sglang="0.5.23"))]
    other_gpu = [record("server", "arm:x", target=Target("9.0"), details={"moe_runner_backend": "marlin"})]
    decision = decide(QUESTION, other_stack + other_gpu)
    assert decision.command is None
    assert decision.other_stacks == 2


def test_the_fastest_wins_and_overlapping_intervals_are_no_difference():
    sound = [
        arm("flashinfer_cutlass", "flashinfer_cudnn"),
        arm("flashinfer_cutlass", "flashinfer_cutlass"),
        arm("marlin", "marlin"),
    ]
    speeds = [
        arm("flashinfer_cutlass", "flashinfer_cudnn", speed=(1229.0, "tok/s", 1200.0, 1260.0), stage="load"),
        arm("flashinfer_cutlass", "flashinfer_cutlass", speed=(1220.0, "tok/s", 1190.0, 1250.0), stage="load"),
        arm("marlin", "marlin", speed=(800.0, "tok/s", 780.0, 820.0), stage="load"),
    ]
    decision = decide(QUESTION, sound + speeds)
    assert decision.chosen == {"moe": "flashinfer_cutlass", "fp4_gemm": "flashinfer_cudnn"}
    assert decision.no_difference == ("--fp4-gemm-backend flashinfer_cutlass --moe-runner-backend flashinfer_cutlass",)
    reasons = {(row.op, row.backend): row.why for row in decision.rejected}
    assert reasons["moe", "marlin"].startswith("right, but not in the fastest")
    assert reasons["fp4_gemm", "flashinfer_cutlass"].startswith("no difference measured")


def served(model, moe, gemm, speed, stage="load") -> Evidence:
    """A record of one arm that served `model`."""
    numbers = (Number("output_tok_s", *speed),)
    details = {"arm": {"model": model, "moe_runner_backend": moe, "fp4_gemm_backend": gemm}}
    return record(stage, f"arm:{model}", numbers=numbers, details=details)


def test_a_single_start_tells_no_arms_apart():
    """Two starts of one arm differed by 1.48 times on an H200; within one start the interval of the requests is narrow."""

    def started(times: int) -> list[Evidence]:
        return [
            served("moe", "triton", None, (900.0, "tok/s", 890.0, 910.0, times)),
            served("moe", "marlin", None, (600.0, "tok/s", 590.0, 610.0, times)),
        ]

    once, often = decide(QUESTION, started(1)), decide(QUESTION, started(3))
    assert once.chosen == often.chosen == {"moe": "triton"}
    assert (once.no_difference, often.no_difference) == (("--moe-runner-backend marlin",), ())
    assert "of one start alone nobody knows" in once.why
    assert "of one start" not in often.why


TWO_MODELS = [
    served("dense", None, "marlin", (5000.0, "tok/s", 4900.0, 5100.0)),
    served("moe", "marlin", None, (900.0, "tok/s", 850.0, 950.0)),
    served("moe", "triton", None, (4990.0, "tok/s", 4980.0, 5000.0)),
]


def test_speeds_of_different_models_are_not_compared():
    """The dense model's arm is no rival of the MoE model's: each names its own op, and neither ties with the other."""
    decision = decide(QUESTION, TWO_MODELS)
    assert decision.chosen == {"fp4_gemm": "marlin", "moe": "triton"}
    assert decision.no_difference == ()
    assert "were not measured together" in decision.why
    assert decide(dataclasses.replace(QUESTION, model="dense"), TWO_MODELS).chosen == {"fp4_gemm": "marlin"}


def test_a_run_judged_again_from_its_log_counts_once_and_a_second_run_stays():
    first = dataclasses.replace(arm("triton", "cudnn", Verdict.CRASH, "exit 1"), artefacts=("logs/x.log",))
    again = dataclasses.replace(first, verdict=Verdict.UNSUPPORTED, reason="refuses")
    reasons = [row.why for row in decide(QUESTION, [first, again]).rejected if row.backend == "triton"]
    assert reasons[0].startswith("unsupported") and "exit 1" not in reasons[0]
    later = dataclasses.replace(arm("triton", "cudnn"), artefacts=("logs/x.log",), written_at="2027-01-01T00:00:00.000+00:00")
    both = decide(QUESTION, [first, later])
    assert both.command is None, "a crash that was seen stays"
    assert "a server with these flags failed" in both.why


def test_a_kernel_that_fails_under_its_own_name_contradicts_the_server():
    case = {"case": {"backend": "sglang.gptq_marlin_gemm"}}
    kernel = record("kernel", "gemm:sglang.gptq_marlin_gemm:exact_t24:m1", Verdict.WRONG, details=case)
    assert decide(QUESTION, [kernel, *TWO_MODELS]).contradictions == (), "a load run alone is no server judged right"
    decision = decide(QUESTION, [kernel, arm("triton", "marlin")])
    assert any(line.startswith("fp4_gemm marlin: its kernel fails probes, yet a server") for line in decision.contradictions)
    assert not any(line.startswith("moe") for line in decision.contradictions)


@pytest.mark.parametrize(("trace", "asks"), [(["marlin"], False), (["triton"], True), (None, True)])
def test_a_server_that_is_seen_to_run_a_kernel_which_fails_probes_is_told_so(trace, asks):
    case = {"case": {"backend": "sglang.gptq_marlin_gemm"}}
    kernel = record("kernel", "gemm:sglang.gptq_marlin_gemm:exact_t24:m1", Verdict.WRONG, details=case)
    server = arm("triton", "marlin")
    rows = [{"operation": "fp4_gemm", "route": "marlin", "log": None, "trace": trace, "ok": True, "why": ""}]
    decision = decide(QUESTION, [kernel, dataclasses.replace(server, details=dict(server.details) | {"kernels": rows})])
    (told,) = (line for line in decision.contradictions if line.startswith("fp4_gemm marlin: its kernel fails probes"))
    assert ("is that kernel the one that ran?" in told) is asks
    assert ("its trace shows this kernel" in told) is not asks
    assert "1 of 1 kernel records fail" in told


def test_a_trace_names_a_family_of_kernels_and_not_a_flag():
    case = {"case": {"backend": "flashinfer.mm_fp4.cutlass"}}
    kernel = record("kernel", "gemm:flashinfer.mm_fp4.cutlass:exact_t24:m1", Verdict.WRONG, details=case)
    server = arm("triton", "flashinfer_cutlass")
    rows = [{"operation": "fp4_gemm", "route": "cutlass", "log": None, "trace": ["cutlass"], "ok": True, "why": ""}]
    decision = decide(QUESTION, [kernel, dataclasses.replace(server, details=dict(server.details) | {"kernels": rows})])
    (told,) = (line for line in decision.contradictions if line.startswith("fp4_gemm flashinfer_cutlass: its kernel fails probes"))
    assert "its trace shows this kernel" in told


def test_flags_seen_under_load_alone_were_not_judged():
    judged = arm("marlin", "marlin")
    loaded = arm("marlin", "marlin", speed=(10.0, "tok/s"), stage="load")
    served_with = {"arm": judged.details["arm"] | {"attention_backend": "triton"}}
    wider = {"arm": judged.details["arm"] | {"attention_backend": "triton", "tp": 2}}
    records = [dataclasses.replace(judged, details=served_with)]
    records += [dataclasses.replace(loaded, details=details) for details in (served_with, wider)]
    told = [line for line in decide(QUESTION, records).beside if "attention" in line]
    assert told == [
        "the server was judged with --attention-backend triton",
        "under load alone it was seen with --attention-backend triton --tp-size 2",
    ]


def test_a_fast_arm_that_is_wrong_is_never_chosen():
    fast_but_wrong = [
        arm("b12x", "flashinfer_cudnn", Verdict.WRONG, "KL above the floor"),
        arm("b12x", "flashinfer_cudnn", speed=(9999.0, "tok/s"), stage="load"),
    ]
    slow = [
        arm("flashinfer_cutlass", "flashinfer_cudnn"),
        arm("flashinfer_cutlass", "flashinfer_cudnn", speed=(10.0, "tok/s"), stage="load"),
    ]
    assert decide(QUESTION, fast_but_wrong + slow).chosen["moe"] == "flashinfer_cutlass"


def test_contradictions_come_first():
    decision = decide(QUESTION, [*READ, arm("flashinfer_trtllm", "flashinfer_cudnn")])
    assert any("source says it raises" in line for line in decision.contradictions)
    kernel_ok_server_not = [
        record("kernel", "moe:flashinfer_cutlass:q"),
        arm("flashinfer_cutlass", "flashinfer_cudnn", Verdict.WRONG, "!!!!"),
    ]
    assert any("its server does not" in line for line in decide(QUESTION, kernel_ok_server_not).contradictions)


def test_an_arm_that_fails_for_its_other_backend_contradicts_no_kernel():
    """cuDNN's kernel is right and one server with it; that two MoE backends died beside it is no contradiction."""
    assert decide(QUESTION, READ + RECORDED).contradictions == ()


def test_a_params_file_without_a_model_asks_about_none(root):
    asked = question_of(params.load(root / "params" / "march_2026_sm120.yaml"))
    assert (asked.model, asked.tp, asked.quantization_flag, asked.cc) == ("MODEL", 4, "modelopt_fp4", "12.0")
    assert question_of(params.check({"model": "nvidia/some-NVFP4"}, "here")).model == "nvidia/some-NVFP4"


@pytest.mark.parametrize(
    ("source", "version"),
    [
        ("0.5.9", "0.5.9"),
        ("0.5.12.post1", "0.5.12.post1"),
        ("a/sglang-0.5.17-py3-none-any.whl", "0.5.17"),
        ("/opt/site/sglang", None),
    ],
)
def test_a_question_asks_about_a_version_wherever_the_source_lies(source, version):
    asked = question_of(params.check({"sglang": source}, "here"))
    assert asked.sglang == version
    assert asked.covers(record("source", "moe:x", Verdict.UNSUPPORTED, target=Target(asked.cc), stack=Stack(sglang=version)))


def test_a_flag_that_touches_no_layer_is_moot():
    audit = record("checkpoint", "model", details={"moot_flags": ["--fp4-gemm-backend"]})
    decision = decide(QUESTION, [audit, *READ, *RECORDED])
    assert decision.chosen == {"moe": "flashinfer_cutlass"}
    assert "--fp4-gemm-backend" not in decision.command
    assert decision.moot == ("--fp4-gemm-backend touches no layer of this checkpoint",)


def test_field_reports_are_cited_and_never_decide():
    reports = field_reports.about("moe", "flashinfer_b12x", "12.0")
    assert reports
    assert not {report.id for report in reports} & {"fi-2577-mmfp4-sm120-all-backends"}, "a report on mm_fp4 says nothing of MoE"
    decision = decide(
        QUESTION, [record("source", "moe:flashinfer_b12x:modelopt_fp4", Verdict.NOT_RUN, "works as far as source shows")]
    )
    assert "reported by others" in decision.rejected[0].why
    assert decision.command is None


def test_a_reading_that_was_repeated_is_cited_once():
    again = dataclasses.replace(READ[1], written_at="2026-11-30T00:00:00.000+00:00")
    [row] = decide(QUESTION, [READ[1], again]).rejected
    assert [line for line in row.evidence if line.startswith("source ")] == [
        f"source {READ[1].subject} {READ[1].verdict}: {READ[1].repro}"
    ]


def test_a_later_reading_replaces_an_earlier_one_of_the_same_question_only():
    raises = record("source", READ[1].subject, Verdict.UNSUPPORTED, "raises: ValueError", repro=READ[1].repro)
    other = dataclasses.replace(raises, repro="nvfp4lab routes --tp 8")
    assert decide(QUESTION, [raises, READ[1]]).standings[0].verdict is Verdict.NOT_RUN
    assert decide(QUESTION, [other, READ[1]]).standings[0].verdict is Verdict.UNSUPPORTED


def test_a_report_is_told_once_however_many_backends_it_speaks_of():
    read = [record("source", f"moe:{name}:modelopt_fp4", Verdict.NOT_RUN, "works") for name in ("cutlass", "flashinfer_cutlass")]
    decision = decide(QUESTION, read)
    shared = field_reports.about("moe", "cutlass", "12.0")[0]
    assert all(shared.id in row.why for row in decision.rejected)
    told = lines(decision)
    assert sum(shared.symptom in line for line in told) == 1
    [told_once] = [line for line in told if shared.symptom in line]
    assert told_once.startswith(f"reported by others, {shared.id} (")
    assert shared.id in json.dumps(decision.to_data())
    assert str(display.reports(decision)).count(html.escape(shared.symptom)) == 1


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (record("kernel", "moe:flashinfer_cutlass:modelopt_fp4"), {"moe": "flashinfer_cutlass"}),
        (arm("a", "b"), {"moe": "a", "fp4_gemm": "b"}),
        (record("server", "arm:x", repro="python -m sglang.launch_server --moe-runner-backend marlin"), {"moe": "marlin"}),
        (record("gate", "fault:nan"), {}),
        (record("kernel", "moe:sglang.moe_wna16_marlin_gemm:exact_moe"), {}),
    ],
)
def test_what_a_record_is_about(made, expected):
    assert backends_of(made) == expected


def test_the_question_is_found_in_the_evidence():
    cpu = [record("server", "arm:bf16", target=Target("cpu"), details={"moe_runner_backend": "auto"})] * 9
    assert asked_by([*cpu, *RECORDED]) == Question("12.0", "0.5.9", "0.6.5")
    assert asked_by([record("gate", "fault:nan")]) is None


def test_the_json_contract(tmp_path, capsys):
    Ledger(tmp_path / "ledger.jsonl").append(*READ, *RECORDED)
    assert cli.main(["decide", str(tmp_path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert {"command", "chosen", "rejected", "confidence", "contradictions", "expires_with", "why"} <= set(answer)
    assert answer["chosen"] == {"moe": "flashinfer_cutlass", "fp4_gemm": "flashinfer_cudnn"}
    assert {"backend", "op", "why", "evidence"} <= set(answer["rejected"][0])


def test_a_path_that_is_no_run_is_an_error(tmp_path, capsys):
    assert cli.main(["decide", str(tmp_path / "nowhere")]) == 1
    assert "neither a run folder" in capsys.readouterr().err
