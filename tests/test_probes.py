"""Probes: unique answers over every legitimate order, and no single wrong code that could hide."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4lab.errors import LabError
from nvfp4lab.kernels import backends, probes, reference
from nvfp4lab.kernels.backends import base
from nvfp4lab.kernels.case_models import BOUNDARY_M
from nvfp4lab.kernels.operands import Fp4Operand, ProbeError
from nvfp4lab.kernels.poison import Segment, free_blocks, graph_segments, run_poisoned
from nvfp4lab.kernels.probes_exact import TIERS, exact_gemm
from nvfp4lab.kernels.probes_moe import exact_moe
from nvfp4lab.kernels.probes_realistic import realistic_gemm, realistic_moe
from nvfp4lab.kernels.probes_rounding import rounding_gemm
from nvfp4lab.kernels.reference import LEGITIMATE_ORDERS, Order
from nvfp4lab.kernels.reference_bounds import gemm_expectation, moe_expectation
from nvfp4lab.kernels.shapes import GemmShape, MoeShape, QuantiseShape
from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.conventions import CONVENTIONS
from nvfp4lab.records import Verdict

blocks = st.integers(1, 20).map(lambda n: 16 * n)


def run(kernel, problem) -> torch.Tensor:
    return run_poisoned(kernel, problem)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), blocks, blocks, st.sampled_from(sorted(TIERS)), st.booleans(), st.integers(0, 10**6))
def test_every_order_gives_the_same_bits(m, n, k, bits, bf16, seed):
    probe = exact_gemm(GemmShape(m, n, k), seed, bits, bf16_activations=bf16)
    for order in LEGITIMATE_ORDERS:
        assert torch.equal(run(reference.gemm_in(order), probe.problem), probe.expected), order.label


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 20), blocks, blocks, st.integers(0, 10**6), st.data())
def test_no_single_wrong_weight_code_can_hide(m, n, k, seed, data):
    probe = exact_gemm(GemmShape(m, n, k), seed, 24)
    weights = probe.problem.weights
    codes = weights.codes.clone()
    row, column = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, k - 1))
    codes[row, column] ^= data.draw(st.integers(1, 15).filter(lambda bit: not (codes[row, column] & 7 == 0 and bit == 8)))
    broken = dataclasses.replace(probe.problem, weights=dataclasses.replace(weights, codes=codes))
    assert not torch.equal(run(reference.gemm, broken), probe.expected)


@pytest.mark.parametrize(("bits", "accumulator"), [(13, torch.bfloat16), (24, torch.float16)])
def test_tiers_tell_the_accumulators_width(bits, accumulator):
    narrow = reference.gemm_in(Order("blocked", 16, accumulator))
    small, large = (exact_gemm(GemmShape(33, 48, 512), 0, tier) for tier in (8, bits))
    assert torch.equal(run(narrow, small.problem), small.expected)
    assert not torch.equal(run(narrow, large.problem), large.expected)


@pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=CONVENTIONS)
def test_quantising_the_activations_gives_them_back(convention):
    """So that a backend that quantises for itself is held to the same answer."""
    activations = exact_gemm(GemmShape(40, 16, 272), 3, 24).problem.activations
    again = Fp4Operand.of(
        codec.quantize(activations.value(torch.float32), global_scale=activations.global_scale, convention=convention)
    )
    if convention.min_block_scale < 2.0**-7:  # torchao raises small scales, by design
        assert torch.equal(again.block_scale.float(), activations.block_scale.float())
    assert torch.equal(again.value(), activations.value()) or convention.min_block_scale >= 2.0**-7


def test_rounding_probe_needs_its_ties():
    probe = rounding_gemm(GemmShape(33, 48, 272), 0)
    exact = (probe.problem.activations.value() @ probe.problem.weights.value().T).float()
    ties = (exact.view(torch.int32) & 0xFFFF) == 0x8000
    assert ties.sum() > 10
    away = ((exact.view(torch.int32) + 0x8000) & -65536).view(torch.float32).bfloat16()
    assert not torch.equal(away, probe.expected)


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 30), blocks, blocks, st.integers(1, 6), st.integers(0, 10**6), st.booleans(), st.booleans())
def test_moe_is_exact_in_every_order_and_in_w4a16(tokens, hidden, intermediate, topk, seed, skewed, split_scale):
    shape = MoeShape(tokens, hidden, intermediate, 3, topk, expert_offset=3, experts_global=8)
    probe = exact_moe(shape, seed, gate_up_ratio=4.0 if split_scale else 1.0, skewed=skewed)
    weight_only = dataclasses.replace(probe.problem, activations=probe.problem.activations.value(torch.bfloat16))
    for order in LEGITIMATE_ORDERS[1:]:
        assert torch.equal(run(reference.moe_in(order), probe.problem), probe.expected), order.label
    assert torch.equal(run(reference.moe, weight_only), probe.expected)


def test_moe_top_10_of_many_experts_is_exact():
    probe = exact_moe(MoeShape(12, 64, 64, 16, 10), 0)
    assert torch.equal(run(reference.moe, probe.problem), probe.expected)


@pytest.mark.parametrize("order", LEGITIMATE_ORDERS, ids=lambda order: order.label)
def test_realistic_bounds_hold_and_are_not_vacuous(order):
    problem = realistic_gemm(GemmShape(40, 64, 512), 0)
    expected, tolerance = gemm_expectation(problem)
    error = (run(reference.gemm_in(order), problem).double() - expected).abs()
    assert (error <= tolerance.values).all()
    assert (error / tolerance.values).max() > 0.5  # a bound that nothing comes near would prove little
    assert tolerance.gain < 2e-3


def test_realistic_moe_bound_is_of_the_size_of_one_flipped_code():
    problem = realistic_moe(MoeShape(40, 64, 64, 4, 2), 0)
    expected, tolerance = moe_expectation(problem)
    error = (run(reference.moe, problem).double() - expected).abs()
    assert (error <= tolerance.values).all()
    assert tolerance.values.median() < 0.2 * expected.abs().mean()


@pytest.mark.parametrize("shape", [GemmShape(4, 16, 24), GemmShape(0, 16, 16)])
def test_impossible_shapes_are_refused(shape):
    with pytest.raises(ProbeError, match="multiple"):
        exact_gemm(shape, 0, 24)


def test_every_probe_says_what_it_sees_and_passes_a_sound_kernel():
    shapes = {"gemm": GemmShape(5, 32, 48), "moe": MoeShape(5, 32, 48, 3, 2), "quantise": QuantiseShape(8, 48)}
    sound = {"gemm": reference.gemm, "moe": reference.moe, "quantise": base.kernel_of(backends.find("codec.flashinfer"))}
    for probe in probes.PROBES.values():
        experiment, kernel = probe.build(shapes[probe.op], 1, "cpu"), sound[probe.op]
        assert experiment.judge(kernel).verdict is Verdict.OK, probe.name
        assert experiment.check(run(kernel, experiment.problem)).verdict is Verdict.OK, probe.name
        assert probe.detects and probe.blind_to


@pytest.mark.parametrize("m", BOUNDARY_M[:-1])
def test_boundary_rows(m):
    probe = exact_gemm(GemmShape(m, 48, 96), m, 24)
    assert torch.equal(run(reference.gemm, probe.problem), probe.expected)


def test_a_write_outside_the_output_is_seen():
    def past_the_end(problem, out):
        reference.gemm(problem, out)
        torch.as_strided(out, (out.shape[0] + 1, out.shape[1]), out.stride())[-1] = 0
        return out

    result = probes.find("exact_t24").build(GemmShape(5, 32, 48), 0, "cpu").judge(past_the_end)
    assert result.verdict is Verdict.WRONG and "guard row 5" in result.reason


def test_free_blocks_are_found_largest_first():
    blocks = [[("active_allocated", 512), ("inactive", 2048)], [("inactive", 4096), ("active_pending_free", 9)]]
    snapshot = [{"blocks": [{"state": state, "size": size} for state, size in segment]} for segment in blocks]
    assert free_blocks(snapshot) == [4096, 2048]


def test_the_memory_of_one_graph_is_found_whole():
    """In use or not: before the first replay nothing in it means anything. Other pools hold operands and other graphs."""
    segments = [
        {"device": 0, "address": 512, "total_size": 64, "segment_pool_id": (0, 0)},
        {"device": 1, "address": 1024, "total_size": 128, "segment_pool_id": (0, 7)},
        {"device": 1, "address": 4096, "total_size": 256, "segment_pool_id": (0, 7)},
        {"device": 0, "address": 8192, "total_size": 32, "segment_pool_id": (0, 8)},
    ]
    assert graph_segments(segments, (0, 7)) == [Segment(1, 1024, 128), Segment(1, 4096, 256)]
    assert graph_segments(segments, (0, 9)) == []


def test_a_quantiser_that_writes_nothing_is_told():
    experiment = probes.find("quantise_codes").build(QuantiseShape(8, 64), 0, "cpu")
    assert "wrote nothing" in experiment.judge(lambda problem, out: out).reason


def test_a_misrouted_token_is_told_by_whose_answer_it_has():
    experiment = probes.find("expert_number").build(MoeShape(6, 64, 64, 4, 2), 0, "cpu")
    right = int(experiment.problem.topk_ids[3, 0])

    def misrouted(problem, out):
        ids = problem.topk_ids.clone()
        ids[3] = (ids[3] + 1) % 4
        return reference.moe(dataclasses.replace(problem, topk_ids=ids), out)

    result = experiment.judge(misrouted)
    assert f"token 3 has the answer of expert {(right + 1) % 4}, asked was expert {right}" in result.reason
    broken = experiment.judge(lambda problem, out: reference.moe(problem, out).mul_(1.5))
    assert "token 0 has no expert's answer" in broken.reason


def test_unknown_probe_lists_the_known():
    with pytest.raises(LabError, match="exact_t24"):
        probes.find("exact_t25")
