"""Backends: what the CPU can say about them, how a case ends, and which cases are planned."""

import dataclasses
import sys
import types

import pytest
import torch

from nvfp4lab.errors import LabError
from nvfp4lab.kernels import backends, plan, probes, reference, variants
from nvfp4lab.kernels.backends import base, flashinfer_mm_fp4, flashinfer_moe, sglang_marlin, torch_cpu
from nvfp4lab.kernels.cases import Case, run_case
from nvfp4lab.kernels.isolate_outcome import without_folders
from nvfp4lab.kernels.operands import Fp4Operand
from nvfp4lab.kernels.probes_exact import exact_gemm
from nvfp4lab.kernels.probes_moe import exact_moe
from nvfp4lab.kernels.shapes import GemmShape, MoeShape, QuantiseShape
from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.layouts import SWIZZLED_128X4
from nvfp4lab.params import Params
from nvfp4lab.records import Stack, Target, Verdict, WrongKind

GEMM, MOE = GemmShape(33, 64, 272), MoeShape(9, 64, 64, 4, 2)
CPU, H200 = Target("cpu", True), Target("9.0", True)
WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def test_every_backend_has_the_protocols_shape():
    for name, backend in backends.every().items():
        assert backend.name == name and backend.op in plan.DECISIVE and backend.arithmetic in ("fp4", "bf16", "fp32")
        assert all(callable(getattr(backend, method)) for method in ("is_available", "can_run", "prepare", "bind"))
        assert set(backend.variants) <= {"tactics", "autotune", "off_bucket", "cuda_graph", "streams"}


@pytest.mark.parametrize("name", ["torch.reference_gemm", "emulation.gemm_float32"])
@pytest.mark.parametrize("probe", [name for name, probe in probes.PROBES.items() if probe.op == "gemm" and not probe.weight_only])
def test_sound_gemm_passes_every_probe(name, probe):
    assert run_case(Case(name, probe, GEMM)).verdict is Verdict.OK


@pytest.mark.parametrize("name", ["torch.reference_moe", "emulation.moe_float32", "emulation.moe_float32_w4a16"])
@pytest.mark.parametrize("probe", [name for name, probe in probes.PROBES.items() if probe.op == "moe"])
def test_sound_moe_passes_every_probe(name, probe):
    assert run_case(Case(name, probe, MOE)).verdict is Verdict.OK


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_narrow_accumulators_are_told_by_the_tiers(kind):
    found = {probe: run_case(Case(f"emulation.gemm_{kind}", probe, GEMM)).verdict for probe in ("exact_t8", "exact_t24")}
    assert found == {"exact_t8": Verdict.OK, "exact_t24": Verdict.WRONG}


MARLIN_ON_AN_H200 = {
    "exact_t8": "ok",
    "exact_t13": "ok",
    "exact_t24": "degraded",
    "exact_bf16": "degraded",
    "global_scale": "inexact",
    "realistic": "inexact",
    "row_permutation": "ok",
    "scale_doubling": "ok",
    "batch_invariance": "ok",
    "split_m": "ok",
    "repeat": "ok",
    "interleave": "ok",
}


@pytest.mark.parametrize("probe", MARLIN_ON_AN_H200)
def test_the_model_of_marlin_fails_what_the_card_failed(probe):
    """sglang 0.5.17 on an H200, 16 x 2048 x 4096; the model at a quarter of each size."""
    result = run_case(Case("emulation.gemm_marlin", probe, GemmShape(16, 512, 1024)))
    assert str(result.kind or result.verdict) == MARLIN_ON_AN_H200[probe]


@WITHOUT_GPU
def test_without_a_gpu_a_gpu_backend_is_not_run_with_the_reason():
    for backend in backends.every().values():
        if backend.name.split(".")[0] in ("flashinfer", "sglang"):
            shape = {"gemm": GEMM, "moe": MOE, "quantise": QuantiseShape(3, 64)}[backend.op]
            result = run_case(Case(backend.name, plan.DECISIVE[backend.op], shape))
            assert result.verdict is Verdict.NOT_RUN and ("not installed" in result.reason or "no CUDA GPU" in result.reason)


class _Stub(torch_cpu.Emulation):
    """An emulation whose launch ends as `error` says."""

    def __init__(self, error: BaseException):
        super().__init__("gemm", torch.float32)
        object.__setattr__(self, "error", error)

    def bind(self, prepared, problem, out):
        raise self.error


class BackendSupportedError(Exception):
    pass


class InternalError(Exception):
    """As a compiled module raises it through its Python binding."""


@pytest.mark.parametrize(
    ("error", "verdict"),
    [
        (BackendSupportedError("mm_fp4 does not support backend 'cudnn' with capability 90"), Verdict.UNSUPPORTED),
        (NotImplementedError("sf_vec_size can only be 16 or 32"), Verdict.UNSUPPORTED),
        (ValueError("NVFP4 Marlin requires output_size_per_partition to be a multiple of 64, got 48."), Verdict.UNSUPPORTED),
        (
            InternalError("Invalid thread config: thread_m_blocks = 1, max_shared_mem = 232448, MKN = [1, 640, 48]"),
            Verdict.UNSUPPORTED,
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), Verdict.OOM),
    ],
)
def test_how_a_case_ends(monkeypatch, error, verdict):
    monkeypatch.setattr(backends, "find", lambda name: _Stub(error))
    result = run_case(Case("stub", "exact_t24", GEMM))
    assert result.verdict is verdict and str(error)[:20] in result.reason


def test_a_refusal_names_the_file_and_not_where_it_was_built(monkeypatch):
    error = InternalError(
        "Failed at /home/u/.cache/build-1/sglang/csrc/gemm/marlin.cuh:745: Invalid thread config: MKN = [1, 640, 48]"
    )
    monkeypatch.setattr(backends, "find", lambda name: _Stub(error))
    reason = run_case(Case("stub", "exact_t24", GEMM)).reason
    assert reason == "InternalError: Failed at marlin.cuh:745: Invalid thread config: MKN = [1, 640, 48]"
    assert without_folders("see https://x.org/a/b.py and /dev/shm") == "see https://x.org/a/b.py and /dev/shm"


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        KeyError("x"),
        RuntimeError("Error in cutlass FP4 gemm"),
    ],
)
def test_what_is_no_refusal_is_left_to_whoever_runs_the_case(monkeypatch, error):
    monkeypatch.setattr(backends, "find", lambda name: _Stub(error))
    with pytest.raises(type(error)):
        run_case(Case("stub", "exact_t24", GEMM))


def test_a_wrong_result_keeps_kind_place_and_conventions():
    result = run_case(Case("emulation.gemm_bfloat16", "exact_t24", GEMM))
    assert result.kind is WrongKind.GARBAGE and result.details["place"]["bad_values"] > 0
    assert result.details["conventions"] == ["partial sums rounded to bfloat16"]
    evidence = result.evidence(Case("emulation.gemm_bfloat16", "exact_t24", GEMM), CPU, Stack())
    assert evidence.subject == "gemm:emulation.gemm_bfloat16:exact_t24:m33n64k272" and "--case" in evidence.repro


def test_a_timed_case_has_a_speed_only_if_it_is_right():
    right, wrong = (run_case(Case(f"emulation.gemm_{kind}", "exact_t24", GEMM, timed=True)) for kind in ("float32", "bfloat16"))
    assert any(number.name == "median_ms" for number in right.numbers)
    assert not any(number.name == "median_ms" for number in wrong.numbers)


@pytest.mark.parametrize(
    "case",
    [Case("a", "b", GEMM, 3, (("variant", "streams"),), True, "x"), Case("a", "b", MOE), Case("a", "b", QuantiseShape(2, 32))],
)
def test_a_case_survives_its_repro_line(case):
    assert Case.from_json(case.to_json()) == case


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", "Expecting value"),
        ("{}", "it lacks backend, op, probe, shape"),
        ('{"op":"gemm","backend":"a","probe":"b"}', "it lacks shape"),
        ('{"op":"fft","backend":"a","probe":"b","shape":{}}', "no op 'fft'; there are gemm, moe, quantise"),
        ('{"op":"gemm","backend":"a","probe":"b","shape":{"m":1}}', "'n' and 'k'"),
    ],
)
def test_a_line_that_is_no_case_is_an_error_for_people(line, said):
    with pytest.raises(LabError, match=f"not a kernel case.*{said}"):
        Case.from_json(line)


def test_a_probe_that_cannot_serve_there_says_nothing_about_the_kernel():
    for shape, words in ((MoeShape(4, 16384, 16, 1, 1), "do not fit into fp32"), (MoeShape(4, 40, 64, 4, 2), "multiples of 16")):
        result = run_case(Case("torch.reference_moe", "exact_moe", shape))
        assert result.verdict is Verdict.NOT_RUN and words in result.reason


def test_probe_and_backend_must_be_for_the_shape():
    with pytest.raises(LabError, match="shape for moe"):
        run_case(Case("torch.reference_gemm", "exact_t24", MOE))


def test_unknown_backend_names_the_nearest():
    with pytest.raises(LabError, match=r"did you mean 'sglang.gptq_marlin_gemm'"):
        backends.find("sglang.gptq_marlin")


def test_a_codec_is_told_by_its_convention_and_a_broken_one_by_where_it_differs():
    told = run_case(Case("codec.modelopt", "quantise_codes", QuantiseShape(21, 256)))
    assert told.verdict is Verdict.OK and "modelopt" in told.details["note"]
    experiment = probes.find("quantise_codes").build(QuantiseShape(21, 256), 0, "cpu")

    def ties_up(problem, out):
        backends.find("codec.modelopt").bind(None, problem, out)()
        out[2, 5] ^= 1
        return out

    result = experiment.judge(ties_up)
    assert result.verdict is Verdict.WRONG and "rows of ties 1" in result.reason and "modelopt" in result.reason


def test_mm_fp4_operands_are_packed_and_swizzled_as_documented():
    operand = exact_gemm(GemmShape(5, 130, 96), 0, 24).problem.weights
    codes, scale, _ = flashinfer_mm_fp4.packed_swizzled(operand)
    assert codes.shape == (130, 48) and scale.shape == (256, 8)
    back = SWIZZLED_128X4.to_linear(scale, 130, 6).view(torch.float8_e4m3fn)
    assert torch.equal(back.float(), operand.block_scale.float()) and torch.equal(codec.unpack(codes), operand.codes)


def test_listed_backends_are_read_from_the_installed_source(monkeypatch, tmp_path):
    (tmp_path / "gemm").mkdir()
    (tmp_path / "gemm" / "x.py").write_text(
        'def mm_fp4(a, backend: Literal["cutlass", "new-one", "auto"] = "auto"): ...\n'
        'Known = Literal["cudnn", "tiled"]\ndef mm_bf16_fp4(a, *, backend: Known): ...\ndef plain(backend: str): ...\n'
    )
    spec = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(flashinfer_mm_fp4.importlib.util, "find_spec", lambda name: spec)
    flashinfer_mm_fp4.listed_backends.cache_clear()
    assert flashinfer_mm_fp4.listed_backends("mm_fp4", "gemm/x.py", ("old",)) == ("cutlass", "new-one", "auto")
    assert flashinfer_mm_fp4.listed_backends("mm_bf16_fp4", "gemm/x.py", ("old",)) == ("cudnn", "tiled")
    assert flashinfer_mm_fp4.listed_backends("plain", "gemm/x.py", ("old",)) == ("old",)
    assert flashinfer_mm_fp4.listed_backends("gone", "gemm/x.py", ("old",)) == ("old",)
    flashinfer_mm_fp4.listed_backends.cache_clear()


@pytest.mark.parametrize("up_first", [True, False])
def test_fused_experts_are_in_the_kernels_order(up_first):
    problem = exact_moe(MOE, 0, gate_up_ratio=4.0).problem
    packed = flashinfer_moe.packed_experts(problem, up_first)
    first = problem.up if up_first else problem.gate
    assert torch.equal(codec.unpack(packed.w13[:, :64].contiguous()), first.codes)
    assert torch.equal(packed.w13_scale[:, :64].view(torch.uint8), first.block_scale.view(torch.uint8))
    assert torch.equal(packed.up_alpha, 4 * packed.gate_alpha)
    assert torch.equal(packed.inner_encode * problem.intermediate_scale, torch.ones(1))


def test_marlin_operands_go_through_sglangs_own_preparation(monkeypatch):
    """SGLang's real functions on the CPU; only its CUDA repack and its workspace are stood in for."""
    fp4 = pytest.importorskip("sglang.srt.layers.quantization.marlin_utils_fp4", exc_type=Exception)
    monkeypatch.setattr(fp4, "gptq_marlin_repack", lambda b_q_weight, perm, size_k, size_n, num_bits: b_q_weight, raising=False)
    monkeypatch.setattr(fp4, "marlin_make_workspace", lambda device, *blocks: torch.zeros(4, dtype=torch.int))
    layer = sglang_marlin.MarlinDense().prepare(exact_gemm(GemmShape(4, 128, 256), 0, 24).problem)
    assert layer.weight_scale.shape == (16, 128) and layer.weight_global_scale.dtype is torch.bfloat16
    moe = sglang_marlin.MarlinMoe().prepare(exact_moe(MoeShape(4, 128, 128, 4, 2), 0).problem)
    assert moe.w13_weight_scale.shape == (4, 8, 256) and moe.w2_weight_scale_2.shape == (4,)


def test_weights_are_prepared_once_for_each_set():
    prepared = []

    class Counting(torch_cpu.Emulation):
        def prepare(self, problem):
            prepared.append(problem)
            return super().prepare(problem)

    kernel = base.kernel_of(Counting("gemm", torch.float32))
    one, other = (exact_gemm(GEMM, seed, 24).problem for seed in (0, 1))
    for problem in (one, dataclasses.replace(one, activations=other.activations), other, one):
        kernel(problem, torch.empty(problem.out_shape, dtype=torch.bfloat16))
    assert len(prepared) == 2


def test_global_scales_in_bf16_do_not_cost_the_kernel_its_verdict_but_are_seen():
    rounded = probes.Form(global_scales_in_bf16=True)
    problem = probes.find("realistic").build(GEMM, 0, "cpu", rounded).problem
    assert problem.weights.global_scale == problem.weights.global_scale.bfloat16()

    def marlin_like(problem, out):
        weights: Fp4Operand = problem.weights
        scale = weights.global_scale.bfloat16().float()
        return reference.gemm(dataclasses.replace(problem, weights=dataclasses.replace(weights, global_scale=scale)), out)

    assert probes.find("realistic").build(GEMM, 0, "cpu", rounded).judge(marlin_like).verdict is Verdict.OK
    assert probes.find("global_scale").build(GEMM, 0, "cpu", rounded).judge(marlin_like).verdict is Verdict.WRONG


def test_weight_only_backends_get_bf16_activations():
    form = probes.Form(weight_only=True)
    for name, shape in (("realistic", GEMM), ("exact_t24", GEMM), ("exact_moe", MOE)):
        assert probes.find(name).build(shape, 0, "cpu", form).problem.activations.dtype is torch.bfloat16


class _FakeTuner:
    """As much of FlashInfer's autotuner as the tactic variant touches."""

    def choose_one(self, custom_op, runners, tuning_config, inputs, **kwargs):
        return runners[0], -1

    def _generate_optimization_profiles(self, tuning_config, inputs):
        return [None]


class _Runner:
    def get_valid_tactics(self, inputs, profile):
        return [0, 1, 2]


class _Tuned(torch_cpu.Emulation):
    """Asks the tuner at each call; tactic 2 forgets a row."""

    def bind(self, prepared, problem, out):
        launch = super().bind(prepared, problem, out)

        def tuned():
            _, tactic = _FakeTuner().choose_one("fp4_gemm", [_Runner()], None, [])
            result = launch()
            if tactic == 2:
                result[-1] = 0
            return result

        return tuned


def test_every_tactic_is_judged(monkeypatch):
    module = types.ModuleType("flashinfer.autotuner")
    module.AutoTuner = _FakeTuner
    monkeypatch.setitem(sys.modules, "flashinfer", types.ModuleType("flashinfer"))
    monkeypatch.setitem(sys.modules, "flashinfer.autotuner", module)
    backend = _Tuned("gemm", torch.float32)
    experiment = probes.find("exact_t24").build(GEMM, 0, "cpu")
    found = {label: experiment.judge(kernel).verdict for label, kernel in variants.kernels(backend, "tactics", experiment.problem)}
    assert list(found.values()) == [Verdict.OK, Verdict.OK, Verdict.WRONG] and list(found)[2].endswith("tactic 2")
    monkeypatch.setattr(backends, "find", lambda name: backend)
    result = run_case(Case("stub", "exact_t24", GEMM, options=(("variant", "tactics"),)))
    assert result.verdict is Verdict.WRONG and "tactic 2" in result.reason and result.details["kernels_judged"] == 3


def test_unknown_variant_is_named():
    with pytest.raises(LabError, match="there are plain"):
        variants.kernels(torch_cpu.BACKENDS[0], "sideways", None)


def test_plan_asks_each_shape_the_decisive_question_and_one_shape_all():
    asked = plan.cases(Params(kernel_backends=["emulation.gemm_float32"], kernel_field_reports=False), CPU)
    by_shape = {shape: [case.probe for case in asked if case.shape == shape] for shape in {case.shape for case in asked}}
    assert all("exact_t24" in found for found in by_shape.values())
    fitting = [probe for probe in probes.PROBES.values() if probe.op == "gemm" and not probe.weight_only]
    assert sorted(len(found) for found in by_shape.values())[-2:] == [1, len(fitting)]


def test_plan_has_one_row_where_a_kernel_cannot_run():
    for target in (CPU, H200):
        asked = plan.cases(Params(kernel_backends=["flashinfer.mm_fp4.cutlass"], kernel_tokens=[1, 16, 64]), target)
        assert len(asked) == 1


def test_a_kernel_that_adds_in_bf16_is_held_to_what_it_promises():
    """Speed is bought with a probe that its arithmetic can pass; the stricter one still says what the arithmetic costs."""
    marlin, moe = backends.find("sglang.gptq_marlin_gemm"), backends.find("sglang.moe_wna16_marlin_gemm")
    assert (plan.decisive_probe(marlin).name, plan.decisive_probe(moe).name) == ("exact_t8", "exact_moe_small")
    assert plan.decisive_probe(backends.find("flashinfer.mm_fp4.cutlass")).name == "exact_t24"
    narrow = torch_cpu.Emulation("moe", torch.bfloat16, "bf16")
    shape = MoeShape(33, 128, 192, 4, 2)
    found = {
        name: probes.find(name).build(shape, 0, "cpu", probes.Form(True)).judge(base.kernel_of(narrow)).verdict
        for name in ("exact_moe_small", "exact_moe")
    }
    assert found == {"exact_moe_small": Verdict.OK, "exact_moe": Verdict.WRONG}


def test_what_adding_in_bf16_costs_is_asked_where_it_happens(monkeypatch):
    """Qwen3-30B-A3B over four GPUs: only the QKV projection has N < 2048 <= K, and it is not the smallest of the dense layers."""
    monkeypatch.setattr(sglang_marlin, "needs_gpu", lambda *packages: None)
    p = Params(
        kernel_backends=["sglang.gptq_marlin_gemm"],
        kernel_models=["qwen3_30b_a3b"],
        kernel_tokens=[1, 16],
        kernel_tp=[1, 4],
        kernel_variants=["streams"],
    )
    asked = plan.cases(p, H200)
    strict = {case.shape for case in asked if case.probe == "exact_t24"}
    assert strict == {GemmShape(16, 1280, 2048), GemmShape(16, 2048, 1024)}
    assert {case.shape for case in asked if case.options} == strict
    whole = plan.cases(p.model_copy(update={"kernel_tp": [1]}), H200)
    assert {case.shape for case in whole if case.probe == "exact_t24"} == {GemmShape(16, 2048, 4096)}


def test_all_probes_are_asked_where_there_is_more_than_one_block():
    """Boundary shapes hold K = 16: one block, of which none can be lost or swapped."""
    for op, kernel in (("gemm", "emulation.gemm_float32"), ("moe", "emulation.moe_float32")):
        p = Params(kernel_backends=[kernel], kernel_models=["boundary"], kernel_field_reports=False)
        asked = {case.shape for case in plan.cases(p, CPU) if case.probe.startswith("realistic")}
        assert asked == {{"gemm": GemmShape(16, 128, 256), "moe": MoeShape(16, 128, 128, 8, 2)}[op]}


def test_plan_on_a_gpu_leaves_emulations_out():
    assert not any(case.backend.startswith(("emulation.", "torch.")) for case in plan.cases(Params(), H200))
    assert any(case.backend.startswith("emulation.") for case in plan.cases(Params(), CPU))


def test_plan_is_free_of_duplicates_and_times_only_the_decisive_probe():
    asked = plan.cases(Params(kernel_timed=True, kernel_models=["tiny", "boundary"]), CPU)
    assert len(asked) == len(set(asked))
    assert {case.probe for case in asked if case.timed} <= set(plan.DECISIVE.values())
