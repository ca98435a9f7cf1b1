"""Consensus table and error figures: they say what the codec does, and could say otherwise."""

import pytest
import torch

from nvfp4lab.nvfp4 import codec, consensus, error, plots, smollm2
from nvfp4lab.nvfp4.conventions import CONVENTIONS, MODELOPT, TORCHAO
from nvfp4lab.records import Evidence


@pytest.fixture(scope="module")
def answers():
    return consensus.consensus()


def group(answers, name: str) -> dict[str, str]:
    return {answer.convention: answer.group for answer in answers if answer.input == name}


def test_every_pair_of_conventions_is_told_apart_by_some_input(answers):
    groups = [group(answers, name) for name in consensus.INPUTS]
    for left in CONVENTIONS:
        for right in CONVENTIONS:
            assert left == right or any(row[left] != row[right] for row in groups), (left, right)


def test_exact_ties_agree_and_rounded_ones_do_not(answers):
    assert set(group(answers, "exact ties").values()) == {"A"}
    assert group(answers, "ties")["torchao"] != "A"


def test_zero_blocks_have_four_answers(answers):
    """GATES of the field: ModelOpt 1.0, torchao 2^-6; compressed-tensors 0.125; FlashInfer 0."""
    x = torch.zeros(1, 16)
    scales = {name: codec.quantize(x, global_scale=1.0, convention=c).block_scale.item() for name, c in CONVENTIONS.items()}
    assert scales == {"modelopt": 1.0, "torchao": 2.0**-6, "compressed-tensors": 0.125, "flashinfer": 0.0}
    assert len(set(group(answers, "zero blocks").values())) == 4


def test_a_convention_agrees_with_itself():
    same = consensus.consensus((MODELOPT, MODELOPT), torch.float32)
    assert {answer.group for answer in same} == {"A"}
    assert all(answer.codes_differ == answer.scales_differ == 0 for answer in same)


def test_shares_are_counted_right():
    """On "minus zero" every other value is -0.0: half of the codes differ between ModelOpt and torchao."""
    of_torchao = consensus.consensus((MODELOPT, TORCHAO))
    assert next(a for a in of_torchao if a.input == "minus zero" and a.convention == "torchao").codes_differ == 0.5


def test_tie_values_are_neighbours_of_the_tie():
    for midpoint, *values in consensus.tie_values():
        grid = codec.e2m1_values()[:8]
        below, above = grid[grid < midpoint].max().item(), grid[grid > midpoint].min().item()
        assert set(values) <= {below, above}


def test_choices_list_only_what_differs():
    rows = consensus.choices((MODELOPT, TORCHAO))
    assert all(left != right for _, left, right in rows)
    assert "zero block scale" in {row[0] for row in rows}


def test_evidence_round_trips(answers):
    records = consensus.to_evidence(answers, "papermill x")
    assert len(records) == len(consensus.INPUTS)
    for record in records:
        again = Evidence.from_json(record.to_json())
        assert again.details["groups"] == group(answers, record.subject.split(":")[-1])


def test_layer_error_is_the_plain_formula():
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    weight[0, :16] = 0
    found = error.layer_error("blk.3.ffn_up", weight)
    value = codec.dequantize(codec.quantize(weight), torch.float32)
    assert (found.layer, found.kind) == (3, "ffn_up")
    assert found.relative_rms == pytest.approx(((value - weight).norm() / weight.norm()).item(), rel=1e-5)
    assert found.zeros == pytest.approx((value == 0).float().mean().item(), rel=1e-5)
    assert found.relative_rms < found.worst_block < 1


def test_normal_weights_err_by_about_a_tenth():
    """Bound on a regression: 9.5 % was measured for normal numbers; truncating instead of rounding gives 20 %."""
    weight = torch.randn(256, 1024, generator=torch.Generator().manual_seed(1))
    assert 0.090 < error.layer_error("blk.0.x", weight).relative_rms < 0.100


def test_real_weights_and_their_pictures():
    weights = dict(weight for weight, _ in zip(smollm2.linear_weights(), range(7), strict=False))
    errors = error.layer_errors(weights.items())
    assert {found.kind for found in errors} == {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}
    assert "7 weight matrices" in error.summary(errors)
    assert len(error.to_evidence(errors, "smollm2", "papermill x")) == 7
    figures = [
        plots.sixteen_values(),
        plots.one_block(weights["blk.0.ffn_down"]),
        plots.block_scales(weights["blk.0.ffn_down"]),
        plots.error_by_layer(errors),
    ]
    assert all(figure.axes and figure.axes[0].has_data() for figure in figures)


def test_consensus_picture_has_a_cell_for_every_answer(answers):
    axes = plots.consensus_table(answers).axes[0]
    assert len(axes.patches) == len(answers)
