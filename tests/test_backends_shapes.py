"""Shapes from config-like records, their splits, and the field reports that are replayed."""

import json
from importlib import resources

import pytest

from nvfp4lab.errors import LabError
from nvfp4lab.kernels import backends, plan
from nvfp4lab.kernels.case_models import BOUNDARY_M, MODELS, boundary_shapes, model_shapes
from nvfp4lab.kernels.case_replays import REPLAYS
from nvfp4lab.kernels.probes_realistic import realistic_moe
from nvfp4lab.kernels.shapes import GemmShape, MoeShape
from nvfp4lab.params import Params


def named(model, *split, tokens=16):
    return {one.source.split()[-1]: one.shape for one in model_shapes(model, tokens, *split)}


def test_shapes_of_a_whole_model():
    shapes = named("qwen3_30b_a3b")
    assert shapes["qkv"] == GemmShape(16, (32 + 2 * 4) * 128, 2048) and shapes["o"] == GemmShape(16, 2048, 4096)
    assert shapes["experts"] == MoeShape(16, 2048, 768, 128, 8)


def test_tensor_parallel_splits_columns_of_the_first_and_rows_of_the_second():
    shapes = named("llama_3_1_8b", 4)
    assert shapes["gate_up"] == GemmShape(16, 2 * 14336 // 4, 4096) and shapes["down"] == GemmShape(16, 4096, 14336 // 4)
    assert shapes["qkv"].n == (32 // 4 + 2 * 2) * 128


def test_more_ranks_than_kv_heads_repeat_them():
    assert named("qwen3_30b_a3b", 8)["qkv"].n == (32 // 8 + 2) * 128


def test_expert_parallel_takes_the_last_rank():
    assert named("qwen3_5_397b_a17b", 1, 4)["experts"] == MoeShape(16, 4096, 1024, 128, 10, 384, 512)


def test_work_counts_only_what_an_even_router_sends_here():
    whole, quarter = named("qwen3_5_397b_a17b")["experts"], named("qwen3_5_397b_a17b", 1, 4)["experts"]
    assert quarter.flops == whole.flops / 4
    assert whole.min_bytes(True) < 512 * 3 * 4096 * 1024  # not all experts are touched by 16 tokens


@pytest.mark.parametrize(("tokens", "experts"), [(1, 8.0), (4096, 128.0)])
def test_bytes_are_those_of_the_experts_that_tokens_ask(tokens, experts):
    """One token asks top-k different experts, no fewer."""
    shape = MoeShape(tokens, 2048, 768, 128, 8)
    in_and_out = tokens * 2048 * 4.0
    weights_of_one = 3 * 2048 * 768 * (0.5 + 1 / 16)
    assert (shape.min_bytes(False) - in_and_out) / weights_of_one == pytest.approx(experts)


def test_experts_asked_by_a_drawn_router_are_as_many_as_counted():
    shape = MoeShape(2, 16, 16, 8, 8, 8, 16)  # half of the experts, as under expert parallelism
    asked = [realistic_moe(shape, seed).topk_ids.unique() for seed in range(60)]
    here = [int((ids >= 8).sum()) for ids in asked]
    counted = (shape.min_bytes(False) - 2 * 16 * 4.0) / (3 * 16 * 16 * (0.5 + 1 / 16))
    assert sum(here) / len(here) == pytest.approx(counted, rel=0.05)


def test_a_config_json_is_read(tmp_path):
    config = {"text_config": {"hidden_size": 256, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 512}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert named(str(path))["experts"] == MoeShape(16, 256, 512, 4, 2)


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({}, {"qkv", "o", "experts", "activations"}),  # as Qwen3-30B-A3B's: an intermediate_size that no layer has
        ({"decoder_sparse_step": 1, "mlp_only_layers": []}, {"qkv", "o", "experts", "activations"}),
        ({"decoder_sparse_step": 2}, {"qkv", "o", "gate_up", "down", "experts", "activations"}),
        ({"mlp_only_layers": [0]}, {"qkv", "o", "gate_up", "down", "experts", "activations"}),
        (  # as DeepSeek-V3's: dense layers first, and latent attention, whose projections are not these
            {"first_k_dense_replace": 3, "kv_lora_rank": 512},
            {"gate_up", "down", "experts", "activations"},
        ),
    ],
)
def test_only_layers_that_a_config_has_give_shapes(tmp_path, more, parts):
    config = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 768}
    config |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128} | more
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert set(named(str(path))) == parts


@pytest.mark.parametrize(("split", "words"), [((7,), "cannot be split into 7"), ((1, 3), "cannot be split over 3 ranks")])
def test_an_impossible_split_is_named(split, words):
    with pytest.raises(LabError, match=words):
        named("qwen3_30b_a3b", *split)


def test_unknown_model_lists_the_known():
    with pytest.raises(LabError, match="qwen3_30b_a3b"):
        model_shapes("qwen9", 1)


def test_boundary_shapes_hold_every_dimension_at_and_off_its_alignment():
    gemm = [one.shape for one in boundary_shapes() if one.shape.op == "gemm"]
    assert {shape.m for shape in gemm} >= {*range(1, 18), 127, 128, 129, 2001} == set(BOUNDARY_M)
    for dimension in ("n", "k"):
        sizes = {getattr(shape, dimension) for shape in gemm}
        assert any(size % 128 for size in sizes) and any(size % 128 == 0 for size in sizes)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_shapes(model):
    assert named(model)


def test_replays_name_reports_that_exist_and_backends_that_exist():
    text = resources.files("nvfp4lab.data").joinpath("field_reports.jsonl").read_text(encoding="utf-8")
    reports = {json.loads(line)["id"] for line in text.splitlines()}
    for replay in REPLAYS:
        assert replay.report in reports or "#" in replay.report, replay.report
        assert any(replay.cases(name) for name in backends.every()), replay


def test_a_replay_is_a_named_case():
    found = [case for name in backends.every() for replay in REPLAYS for case in replay.cases(name)]
    assert all(case.source.startswith("report ") for case in found)
    assert any(dict(case.options).get("variant") == "off_bucket" and case.shape == GemmShape(2001, 10304, 2688) for case in found)


def test_params_reach_the_plan():
    shapes = {one.shape for one in plan.shapes(Params(kernel_models=["tiny"], kernel_tokens=[3], kernel_ep=[1, 2]))}
    assert {shape.experts for shape in shapes if shape.op == "moe"} == {8, 4}
