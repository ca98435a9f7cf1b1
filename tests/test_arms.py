"""An arm becomes the command line that it says, and only arms worth a start are started."""

import re
import sys

import pydantic
import pytest

from nvfp4lab import params
from nvfp4lab.params import ParamsError
from nvfp4lab.records import Evidence, Stack, Target, Verdict
from nvfp4lab.server import arms_plan, arms_routes
from nvfp4lab.server.arms import CPU_FLAGS, STAND_IN, Arm, Speculation, environment_here, grid


def gpu_arm(name="x", **fields) -> Arm:
    return Arm(name=name, model="m", device="cuda", **fields)


def test_a_bare_arm_gives_no_flag_beyond_the_model():
    assert gpu_arm().command("/models/m", 31000)[1:] == [
        *("-m", "sglang.launch_server", "--model-path", "/models/m", "--host", "127.0.0.1", "--port", "31000")
    ]
    assert gpu_arm().command("/m", 1)[0] == sys.executable


def test_the_port_where_ranks_meet_is_the_labs_choice_unless_the_arm_names_one():
    assert gpu_arm().command("/m", 1, 11000)[-2:] == ["--nccl-port", "11000"]
    assert gpu_arm(flags=("--nccl-port", "5")).command("/m", 1, 11000)[-2:] == ["--nccl-port", "5"]


def test_every_field_reaches_the_command_line():
    arm = gpu_arm(
        quantization="modelopt_fp4",
        fp4_gemm_backend="flashinfer_cutlass",
        moe_runner_backend="flashinfer_trtllm",
        moe_a2a_backend="deepep",
        attention_backend="triton",
        tp=8,
        ep=4,
        dp=2,
        speculation=Speculation(num_steps=2),
        flags=("--mem-fraction-static", "0.85"),
    )
    told = " ".join(arm.backend_flags())
    for expected in (
        "--quantization modelopt_fp4",
        "--fp4-gemm-backend flashinfer_cutlass",
        "--moe-runner-backend flashinfer_trtllm",
        "--moe-a2a-backend deepep",
        "--attention-backend triton",
        "--tp-size 8 --ep-size 4 --dp-size 2",
        "--speculative-algorithm NEXTN --speculative-num-steps 2",
        "--mem-fraction-static 0.85",
    ):
        assert expected in told


DP_ATTENTION = {"tp": 4, "dp": 4, "flags": ("--enable-dp-attention",)}


@pytest.mark.parametrize(("fields", "gpus"), [({}, 1), ({"tp": 4}, 4), ({"tp": 4, "dp": 2}, 8), (DP_ATTENTION, 4)])
def test_gpus_needed(fields, gpus):
    assert gpu_arm(**fields).gpus() == gpus


def test_a_cpu_arm_gets_the_cpu_flags_but_keeps_its_own():
    command = Arm(name="x", model="m", device="cpu", flags=("--max-total-tokens", "512")).command("/m", 1)
    assert command.count("--max-total-tokens") == 1
    assert command[command.index("--max-total-tokens") + 1] == "512"
    assert all(flag in command for flag in CPU_FLAGS)


def test_the_stand_in_is_only_on_the_path_without_a_gpu(monkeypatch):
    monkeypatch.setattr("nvfp4lab.server.processes_gpu.used_mib", lambda: ())
    assert environment_here({"PYTHONPATH": "/mine"})["PYTHONPATH"] == f"{STAND_IN}:/mine"
    monkeypatch.setattr("nvfp4lab.server.processes_gpu.used_mib", lambda: (100.0,))
    assert environment_here({"PYTHONPATH": "/mine"}) == {"PYTHONPATH": "/mine"}


def test_an_arms_own_variables_win():
    arm = Arm(name="x", model="m", device="cpu", env={"SGLANG_USE_CPU_ENGINE": "0", "A": "1"})
    assert {"SGLANG_USE_CPU_ENGINE": "0", "A": "1"}.items() <= arm.environment({}).items()


BAD_FIELDS = [
    {"name": "a b"},
    {"name": "../x"},
    {"tp": 0},
    {"tp": 2, "ep": 3},
    {"tp": "2"},
    {"flags": [""]},
    {"fp4_gemm_backend": ""},
    {"device": "tpu"},
]


@pytest.mark.parametrize("wrong", BAD_FIELDS)
def test_bad_arms_are_refused(wrong):
    with pytest.raises(pydantic.ValidationError):
        Arm.model_validate({"name": "x", "model": "m"} | wrong)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--max-total-tokens 4096"], "write '--max-total-tokens', '4096'"),
        (["--max-total-tokens=4096"], "write '--max-total-tokens', '4096'"),
        (["--tp", "4"], "--tp has a field of its own: tp"),
        (["--data-parallel-size", "2"], "has a field of its own: dp"),
        (["--moe-runner-backend", "triton"], "has a field of its own: moe_runner_backend"),
        (["--speculative-algorithm", "NEXTN"], "has a field of its own: speculation"),
        (["--port", "30000"], "is chosen by the lab"),
    ],
)
def test_flags_that_would_mislead_the_lab_are_refused(flags, told):
    """Each would be a server on too few GPUs, at another port, or refused by SGLang for our typing."""
    with pytest.raises(pydantic.ValidationError, match=re.escape(told)):
        gpu_arm(flags=flags)
    gpu_arm(flags=["--json-model-override-args", '{"a b": "c=d"}'])


def test_a_params_error_inside_an_arm_names_the_nearest_field():
    with pytest.raises(ParamsError, match=r"arms\.0\.fp4_gemm: unknown name; did you mean 'fp4_gemm_backend'"):
        params.check({"arms": [{"name": "x", "model": "m", "fp4_gemm": "marlin"}]}, "here")


def test_two_arms_of_one_name_are_refused():
    with pytest.raises(ParamsError, match="occur twice: x"):
        params.check({"arms": [{"name": "x", "model": "a"}, {"name": "x", "model": "b"}]}, "here")


def test_grid_is_every_combination_with_names_that_differ():
    made = grid(gpu_arm("q"), fp4_gemm_backend=["marlin", "flashinfer_cutlass"], tp=[1, 2], speculation=[None, Speculation()])
    assert len(made) == len({arm.name for arm in made}) == 8
    assert made[0].name == "q+marlin+tp1+no-speculation"
    assert made[-1].speculation == Speculation()


def test_what_stage_1_proves_to_raise_is_listed_and_started_only_on_request():
    arms = [gpu_arm("good"), gpu_arm("bad", fp4_gemm_backend="flashinfer_trtllm")]
    refusals = {"bad": "ValueError at modelopt_quant.py:1"}
    planned = arms_plan.plan(arms, 1, refusals)
    assert [(item.arm.name, item.start) for item in planned] == [("good", True), ("bad", False)]
    assert "modelopt_quant.py:1" in planned[1].reason
    assert all(item.start for item in arms_plan.plan(arms, 1, refusals, on_request=["bad"]))


def test_arms_that_differ_only_in_a_moot_flag_are_started_once():
    arms = [gpu_arm("a"), gpu_arm("b", fp4_gemm_backend="marlin"), gpu_arm("c", fp4_gemm_backend="marlin", tp=2)]
    moot = {"m": {"--fp4-gemm-backend": "all FP4 layers are routed experts"}}
    planned = arms_plan.plan(arms, 2, moot=moot)
    assert [item.start for item in planned] == [True, False, True]
    assert planned[1].reason == "the same as a: all FP4 layers are routed experts"
    assert all(item.start for item in arms_plan.plan(arms, 2))


def test_a_draft_model_of_its_own_needs_no_mtp_layer():
    drafts = (Speculation(), Speculation(algorithm="EAGLE3", draft_model="d"), Speculation(algorithm="NGRAM"))
    arms = [gpu_arm("a"), *(gpu_arm(draft.algorithm, speculation=draft) for draft in drafts)]
    planned = arms_plan.plan(arms, 1, moot={"m": {"--speculative-algorithm NEXTN": "no MTP layer is stored"}})
    assert [item.start for item in planned] == [True, False, True, True]
    assert planned[1].reason == "the same as a: no MTP layer is stored"


def test_the_twin_of_an_arm_that_is_not_started_is_started():
    arms = [gpu_arm("a", fp4_gemm_backend="x"), gpu_arm("b", fp4_gemm_backend="y")]
    planned = arms_plan.plan(arms, 1, {"a": "raises"}, {"m": {"--fp4-gemm-backend": "moot"}})
    assert [item.start for item in planned] == [False, True]


def test_an_arm_that_needs_more_gpus_than_there_are_is_listed():
    planned = arms_plan.plan([gpu_arm(tp=4)], 1)
    assert not planned[0].start and planned[0].reason == "needs 4 GPUs, this machine has 1"


TRTLLM = "fp4_gemm:flashinfer_trtllm:modelopt_fp4"


def route(subject=TRTLLM, cc="12.0", sglang="0.5.23", verdict=Verdict.UNSUPPORTED, repro="nvfp4lab routes") -> Evidence:
    return Evidence("source", subject, Target(cc), Stack(sglang=sglang), verdict, repro, "it raises")


@pytest.mark.parametrize(
    ("record", "counts"),
    [
        (route(), True),
        (route(cc="10.0"), False),
        (route(sglang="0.5.9"), False),
        (route(subject="fp4_gemm:marlin:modelopt_fp4"), False),
        (route(subject="moe:flashinfer_trtllm:modelopt_fp4"), False),
        (route(verdict=Verdict.NOT_RUN), False),
        (route(repro="nvfp4lab routes --tp 2 --ep 1"), False),
        (route(repro="nvfp4lab routes --a2a deepep"), False),
        (route(repro="nvfp4lab routes --flag-given --op fp4_gemm"), False),
        (route(repro="nvfp4lab routes --a2a none --tp 1 --ep 1 --gated --flag-absent --op fp4_gemm"), True),
    ],
)
def test_a_route_record_refuses_an_arm_only_if_it_is_about_it(record, counts):
    arm = gpu_arm("bad", fp4_gemm_backend="flashinfer_trtllm")
    assert arms_routes.refusals_of([arm], [record], "12.0", "0.5.23") == ({"bad": "it raises"} if counts else {})
