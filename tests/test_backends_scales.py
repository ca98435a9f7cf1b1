"""Scales mean to a kernel what its source says: each stand-in multiplies as the real kernel does, on the real preparation."""

import dataclasses
import sys
import types

import pytest
import torch

from nvfp4lab.kernels import backends, cases, probes, reference
from nvfp4lab.kernels.backends import base
from nvfp4lab.kernels.operands import ProbeError
from nvfp4lab.kernels.shapes import MoeShape
from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.conventions import E2M1_VALUES
from nvfp4lab.nvfp4.layouts import SWIZZLED_128X4
from nvfp4lab.records import Verdict

NAMES = ("flashinfer", "flashinfer.cute_dsl", "flashinfer.cute_dsl.utils")
SHAPE = MoeShape(9, 128, 64, 6, 2)
VALUES = torch.tensor([*E2M1_VALUES, *(-value for value in E2M1_VALUES)], dtype=torch.float64)  # by code


def unscaled(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[E, rows, K] in float64 of packed codes and 128x4-swizzled block scales; no global scale."""
    experts, rows, bytes_ = codes.shape
    linear = SWIZZLED_128X4.to_linear(scales.view(torch.uint8).reshape(experts, -1, bytes_ // 8), rows, bytes_ // 8)
    return VALUES[codec.unpack(codes).long()] * linear.view(torch.float8_e4m3fn).double().repeat_interleave(16, -1)


def rounded_to_fp4(x: torch.Tensor, divisor: torch.Tensor) -> torch.Tensor:
    """Codes times block scales of x / divisor, as `quantize_block_fp4` of flashinfer/cute_dsl/fp4_common.py leaves them."""
    tensor = codec.quantize(x.float(), encode_scale=1 / divisor.float())
    return VALUES[codec.unpack(tensor.codes).long()] * tensor.block_scale.double().repeat_interleave(16, -1)


def b12x(x, ids, weights, w1, w2, alphas, divisors) -> torch.Tensor:
    """FC1 [up, gate], SiLU, FC2, weighted sum, in float64. alphas, divisors: of FC1 and FC2, by expert."""
    total = torch.zeros(x.shape[0], w2.shape[1], dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(ids.shape[0]), torch.arange(ids.shape[1])).tolist():
        expert = int(ids[token, slot])
        up, gate = (alphas[0][expert] * (w1[expert] @ rounded_to_fp4(x[token : token + 1], divisors[0][expert])[0])).chunk(2)
        inner = rounded_to_fp4((torch.nn.functional.silu(gate.float()) * up.float())[None], divisors[1][expert])[0]
        total[token] += weights[token, slot] * alphas[1][expert] * (w2[expert] @ inner)
    return total


def b12x_of_0_6_15(*, x, w1_weight, w1_weight_sf, w2_weight, w2_weight_sf, w1_alpha, w2_alpha, fc2_input_scale, output, **routing):
    """`w1_alpha` in two roles."""
    divisors, ids = (w1_alpha, fc2_input_scale.expand(len(w1_alpha))), routing["token_selected_experts"]
    weights = (unscaled(w1_weight, w1_weight_sf), unscaled(w2_weight, w2_weight_sf))
    return output.copy_(b12x(x, ids, routing["token_final_scales"], *weights, (w1_alpha, w2_alpha), divisors))


def b12x_of_0_7_4(*, w1_alpha, input_global_scale, fc2_input_scale, w2_alpha, x, output, **rest):
    """The divisor of FC1 apart, and put into the multiplier by the function itself."""
    weights = (unscaled(rest["w1_weight"], rest["w1_weight_sf"]), unscaled(rest["w2_weight"], rest["w2_weight_sf"]))
    divisors = (input_global_scale.expand(len(w1_alpha)), fc2_input_scale.expand(len(w1_alpha)))
    routing = (rest["token_selected_experts"], rest["token_final_scales"])
    return output.copy_(b12x(x, *routing, *weights, (w1_alpha * input_global_scale, w2_alpha), divisors))


@pytest.fixture
def flashinfer(monkeypatch):
    """A package of that name in which tests put what they stand in for."""
    backends.every()  # asks an installed FlashInfer what it has
    package, cute_dsl, utils = (
        types.ModuleType(name) for name in ("flashinfer", "flashinfer.cute_dsl", "flashinfer.cute_dsl.utils")
    )
    utils.convert_sf_to_mma_layout = lambda scales, **_: scales  # a permutation, with tests of its own upstream
    for module in (package, cute_dsl, utils):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return package


def verdict(backend: str, probe: str) -> Verdict:
    found = backends.find(backend)
    return probes.find(probe).build(SHAPE, 0, "cpu").judge(base.kernel_of(found)).verdict


@pytest.mark.parametrize("kernel", [b12x_of_0_6_15, b12x_of_0_7_4])
@pytest.mark.parametrize("probe", ["exact_moe", "expert_number"])
def test_a_sound_b12x_moe_is_right_whichever_way_it_takes_its_scales(flashinfer, kernel, probe):
    flashinfer.b12x_fused_moe = kernel
    assert verdict("flashinfer.b12x_fused_moe", probe) is Verdict.OK


def trtllm_that_routes(problems):
    """Top-k of the bf16 logits, softmax in fp32, weights kept in bf16; the rest is the reference on those weights."""

    def kernel(*, routing_logits, top_k, **given):
        assert routing_logits.dtype is torch.bfloat16 and given["routing_method_type"] == 1
        chosen = routing_logits.float().topk(top_k)
        routed = dataclasses.replace(
            problems[-1], topk_ids=chosen.indices.int(), topk_weights=chosen.values.softmax(-1).bfloat16().float()
        )
        return [reference.moe(routed, torch.empty(routed.out_shape, dtype=torch.bfloat16))]

    return kernel


def trtllm_that_is_routed(problems):
    """Expert above, bf16 weight below in one int32; the answer is written where it was asked for."""

    def kernel(*, topk_ids, output, top_k, **given):
        assert topk_ids.dtype is torch.int32 and topk_ids.shape[1] == top_k and given["routing_method_type"] == 1
        weights = (topk_ids & 0xFFFF).to(torch.int16).view(torch.bfloat16).float()
        routed = dataclasses.replace(problems[-1], topk_ids=topk_ids >> 16, topk_weights=weights)
        return [output.copy_(reference.moe(routed, torch.empty_like(output)))]

    return kernel


@pytest.mark.parametrize("probe", ["exact_moe", "expert_number", "realistic_moe"])
def test_a_sound_kernel_that_is_given_its_routing_is_right_and_writes_the_output(flashinfer, monkeypatch, probe):
    problems = []
    moe = types.ModuleType("flashinfer.fused_moe")
    moe.trtllm_fp4_block_scale_routed_moe = trtllm_that_is_routed(problems)
    monkeypatch.setitem(sys.modules, moe.__name__, moe)
    found = backends.find("flashinfer.trtllm_fp4_block_scale_routed_moe")
    backend = dataclasses.replace(found, prepare_with=lambda problem: {})

    def kernel(problem, out):
        problems.append(problem)
        result = base.run(backend, backend.prepare(problem), problem, out)
        assert result.data_ptr() == out.data_ptr()
        return result

    assert probes.find(probe).build(SHAPE, 0, "cpu", cases._form(found)).judge(kernel).verdict is Verdict.OK


@pytest.mark.parametrize("topk", [2, 4, 5])
@pytest.mark.parametrize("probe", [name for name, probe in probes.PROBES.items() if probe.op == "moe"])
def test_a_sound_kernel_that_routes_for_itself_is_right(flashinfer, monkeypatch, probe, topk):
    problems = []
    moe = types.ModuleType("flashinfer.fused_moe")
    moe.trtllm_fp4_block_scale_moe = trtllm_that_routes(problems)
    monkeypatch.setitem(sys.modules, moe.__name__, moe)
    found = backends.find("flashinfer.trtllm_fp4_block_scale_moe")
    backend = dataclasses.replace(found, prepare_with=lambda problem: {})

    def kernel(problem, out):
        problems.append(problem)
        return base.run(backend, backend.prepare(problem), problem, out)

    shape = dataclasses.replace(SHAPE, topk=topk)
    if probe == "zero_expert":
        with pytest.raises(ProbeError, match="cannot be asked"):
            probes.find(probe).build(shape, 0, "cpu", cases._form(found))
        return
    experiment = probes.find(probe).build(shape, 0, "cpu", cases._form(found))
    assert experiment.judge(kernel).verdict is Verdict.OK


@pytest.mark.parametrize(
    "shape", [SHAPE, dataclasses.replace(SHAPE, expert_offset=6, experts_global=12), MoeShape(1, 128, 64, 6, 2)]
)
def test_a_masked_kernel_is_dealt_its_tokens_and_its_answers_are_added_up(monkeypatch, shape):
    """The stand-in answers each expert's tokens, and leaves NaN where it was given none."""
    problems = []

    def masked(dealt, encode, masked_m):
        answers = torch.full((*dealt[0].shape[:2], shape.hidden), float("nan"), dtype=torch.bfloat16)
        for expert, count in enumerate(masked_m.tolist()):
            ids = torch.full((count, 1), expert + problems[-1].expert_offset, dtype=torch.int32)
            asked = {"activations": dealt[0][expert, :count], "topk_ids": ids, "topk_weights": torch.ones(count, 1)}
            if count:
                reference.moe(dataclasses.replace(problems[-1], **asked), answers[expert, :count])
        return answers

    module = types.ModuleType("sglang.srt.layers.moe.flashinfer_cutedsl_moe")
    module.flashinfer_cutedsl_moe_masked = masked
    monkeypatch.setitem(sys.modules, module.__name__, module)
    backend = dataclasses.replace(backends.find("flashinfer.grouped_gemm_nt_masked"), prepare_with=lambda problem: {})

    def kernel(problem, out):
        problems.append(problem)
        return base.run(backend, {}, problem, out)

    assert probes.find("exact_moe").build(shape, 0, "cpu").judge(kernel).verdict is Verdict.OK
