"""Route, log and trace must name the same kernel; each way of failing to is told apart."""

import gzip
import json

import pytest

from nvfp4lab import stack
from nvfp4lab.nvfp4.checkpoint_modules import LayerKind
from nvfp4lab.records import Evidence, Stack, Target, Verdict
from nvfp4lab.server import which_kernel, which_kernel_witness
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.which_kernel import PLAIN, Family, agreement

MARLIN, CUTLASS, TRTLLM = Family.MARLIN, Family.CUTLASS, Family.TRTLLM


@pytest.mark.parametrize(
    ("route", "log", "trace", "ok", "why"),
    [
        (MARLIN, MARLIN, (MARLIN,), True, "route: marlin, log: marlin, trace: marlin"),
        (MARLIN, None, (MARLIN,), True, "log: silent"),
        (None, MARLIN, (MARLIN,), True, "route: silent"),
        (None, None, (MARLIN,), False, "neither route nor log"),
        (MARLIN, CUTLASS, (MARLIN,), False, "route and log name different kernels"),
        (CUTLASS, CUTLASS, (MARLIN,), False, "another kernel ran"),
        (MARLIN, MARLIN, (), False, "no kernel of this operation"),
        (MARLIN, MARLIN, (MARLIN, CUTLASS), False, "several kernels"),
        (MARLIN, MARLIN, None, False, "no trace was taken"),
    ],
)
def test_agreement(route, log, trace, ok, why):
    found = agreement("moe", route, log, trace)
    assert found.ok is ok and why in found.why


# Kernel names as profilers show them, shortened in the template arguments.
TRACED = [
    ("void marlin::Marlin<__nv_bfloat16, 562949953487106l, 128, 1, 8, 8, 4, 2, false>(int4 const*)", "fp4_gemm", MARLIN),
    ("void device::marlin_moe_wna16::Marlin<__nv_bfloat16, 1l, 128, 1, 8, 8>(int4 const*)", "moe", MARLIN),
    ("void device::marlin_moe::Marlin<__nv_bfloat16, 1l, 128, 1, 8, 8>(int4 const*)", "moe", MARLIN),
    ("void cutlass::device_kernel<flashinfer::gemm::DeviceGemmFp4GemmSm120<cutlass::nv_float4_t>>", "fp4_gemm", CUTLASS),
    ("void cutlass::device_kernel<GemmUniversal<cutlass::gemm::GroupProblemShape<float_e2m1_t>>>", "moe", CUTLASS),
    ("bmm_E2m1_E2m1E2m1_Fp32_t128x8x512u2_s6_et128x8_m128x8x64_cga1x1x1_16dp256b_TN_sm100f", "moe", TRTLLM),
    ("gemm_Bfloat16_E2m1E2m1_Fp32_t128x128x256_s4_TN_transOut_sm100f", "fp4_gemm", TRTLLM),
    ("cudnn_generated_fort_native_sdpa_fp4_block_scale_matmul", "fp4_gemm", Family.CUDNN),
    ("kernel_cutlass_kernel_Sm100BlockScaledPersistentDenseGemmKernel_object", "fp4_gemm", Family.CUTE_DSL),
    ("fused_moe_kernel", "moe", Family.TRITON),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", PLAIN, Family.PLAIN),
    ("aten::mm", PLAIN, Family.PLAIN),
]


@pytest.mark.parametrize(("name", "operation", "family"), TRACED)
def test_a_kernel_name_tells_operation_and_family(name, operation, family):
    for asked in ("fp4_gemm", "moe", PLAIN):
        assert which_kernel.of_trace([name], asked) == ((family,) if asked == operation else ())


@pytest.mark.parametrize(
    "name",
    [
        "void rms_norm_kernel<bf16>",
        "void device::marlin::gptq_marlin_repack_kernel<4>",
        "nvfp4_quantize",
        "_fwd_kernel",
        "aten::copy_",
    ],
)
def test_other_kernels_say_nothing(name):
    assert not any(which_kernel.of_trace([name], operation) for operation in ("fp4_gemm", "moe", PLAIN))


def trace_file(tmp_path, events, name="t.trace.json.gz"):
    path = tmp_path / name
    content = json.dumps({"traceEvents": events}).encode()
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    return path


@pytest.mark.parametrize("name", ["t.trace.json.gz", "t.json"])
def test_gpu_kernels_are_read_from_a_trace_and_operators_only_without_any(tmp_path, name):
    operator = {"cat": "cpu_op", "name": "aten::mm"}
    kernel = {"cat": "kernel", "name": "marlin::Marlin<1>", "ts": 1, "dur": 2}
    assert which_kernel.kernel_names(trace_file(tmp_path, [operator, kernel, kernel, {"ph": "M"}], name)) == {
        "marlin::Marlin<1>": 2
    }
    assert which_kernel.kernel_names(trace_file(tmp_path, [operator], name)) == {"aten::mm": 1}


LOG_023 = (
    "server_args={'model_path': 'm', 'quantization': 'modelopt_fp4', "
    "'fp4_gemm_runner_backend': 'flashinfer_cudnn', 'moe_runner_backend': 'auto'}"
)
LOG_017 = "server_args=ServerArgs(model_path='m', quantization=None, fp4_gemm_runner_backend='auto', moe_runner_backend='marlin')"


@pytest.mark.parametrize(
    ("log", "operation", "family"),
    [
        (LOG_023, "fp4_gemm", Family.CUDNN),
        (LOG_023, "moe", None),
        (LOG_023, PLAIN, None),
        (LOG_017, "fp4_gemm", None),
        (LOG_017, "moe", MARLIN),
        (LOG_017, PLAIN, Family.PLAIN),
        (LOG_023 + "\nUse flashinfer_cutlass as MoE runner backend on SM110/SM120 for Qwen3MoeForCausalLM", "moe", CUTLASS),
        ("Use marlin as FP4 GEMM runner backend on SM120 for Muse Glimmer\n" + LOG_017, "fp4_gemm", MARLIN),
    ],
)
def test_the_log_names_a_family_or_is_silent(log, operation, family):
    assert which_kernel.of_log(log, operation) is family


@pytest.mark.parametrize(
    ("final_call", "flag", "family"),
    [
        ("sglang.kernels.ops.gemm.gptq_marlin.gptq_marlin_gemm", "auto", MARLIN),
        ("flashinfer.fused_moe.trtllm_fp4_block_scale_moe", "auto", TRTLLM),
        ("flashinfer.fused_moe.cutlass_fused_moe", "auto", CUTLASS),
        ("flashinfer.CuteDslMoEWrapper.run", "auto", Family.CUTE_DSL),
        ("flashinfer.mm_fp4", "flashinfer_cudnn", Family.CUDNN),
        ("flashinfer.mm_fp4", "auto", None),
        ("not found", "auto", None),
    ],
)
def test_a_route_ends_in_a_family(final_call, flag, family):
    assert which_kernel.of_route({"final_call": final_call}, flag) is family


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({LayerKind.DENSE: 4, LayerKind.SHARED_EXPERT: 0, LayerKind.ROUTED_EXPERT: 0}, ("fp4_gemm",)),
        ({LayerKind.DENSE: 0, LayerKind.SHARED_EXPERT: 2, LayerKind.ROUTED_EXPERT: 8}, ("fp4_gemm", "moe")),
        ({LayerKind.ROUTED_EXPERT: 8}, ("moe",)),
        ({LayerKind.DENSE: 0, LayerKind.ROUTED_EXPERT: 0}, (PLAIN,)),
    ],
)
def test_what_must_be_traced_depends_on_the_checkpoint(layers, expected):
    assert which_kernel_witness.operations(layers) == expected


def test_a_route_is_taken_from_the_ledger_only_when_it_is_unambiguous_and_about_this_gpu():
    here, captured = stack.here(), stack.capture()

    def record(final_call: str, cc: str = here.cc, repro: str = "nvfp4lab routes") -> Evidence:
        subject, details = "moe:auto:modelopt_fp4", {"final_call": final_call}
        return Evidence(
            "source", subject, Target(cc), Stack(sglang=captured.sglang), Verdict.NOT_RUN, repro, "read", details=details
        )

    arm = Arm(name="x", model="m")
    one, other = record("flashinfer.fused_moe.cutlass_fused_moe"), record("flashinfer.fused_moe.trtllm_fp4_block_scale_moe")
    assert which_kernel_witness.route_family(arm, "moe", [one, one]) is CUTLASS
    assert which_kernel_witness.route_family(arm, "moe", [one, other]) is None
    assert which_kernel_witness.route_family(arm, "fp4_gemm", [one]) is None
    elsewhere = record("flashinfer.fused_moe.trtllm_fp4_block_scale_moe", cc="99.0")
    asked_otherwise = record("flashinfer.fused_moe.trtllm_fp4_block_scale_moe", repro="nvfp4lab routes --tp 8")
    assert which_kernel_witness.route_family(arm, "moe", [one, elsewhere, asked_otherwise]) is CUTLASS
