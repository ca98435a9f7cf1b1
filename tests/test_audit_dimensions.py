"""Sizes alone: each view on a model of one layer, where no other view can help, and models that differ on purpose."""

from collections.abc import Callable
from pathlib import Path

import pytest

from audit_synthesis import EXPERTS, HIDDEN, INTER, LAYERS, Synthetic, attention, compressed_tensors, mlp, qwen3_moe, unquantised
from nvfp4lab.nvfp4.audit import audit

LAYER = "model.layers.0"
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def wrong_shapes(model: Synthetic, folder: Path) -> list[str]:
    """Names of the tensors that are found; nothing but sizes may be."""
    found = audit(model.write(folder)).findings
    assert {finding.kind for finding in found} <= {"wrong_shape"}, found
    return [finding.tensor.removeprefix(f"{LAYER}.").removesuffix(".weight") for finding in found]


def bf16(**shapes: tuple[int, int]) -> Callable[[Synthetic], None]:
    """Other sizes in layer 0; `self_attn__k_proj` for a dot."""
    return lambda model: [model.bf16(f"{LAYER}.{name.replace('__', '.')}", *shape) for name, shape in shapes.items()]


def fused(rows: int) -> Callable[[Synthetic], None]:
    def change(model: Synthetic) -> None:
        for leaf in ("gate_proj", "up_proj"):
            del model.tensors[f"{LAYER}.mlp.{leaf}.weight"]
        model.bf16(f"{LAYER}.mlp.gate_up_proj", rows, HIDDEN)

    return change


def router(experts: int) -> Callable[[Synthetic], None]:
    def change(model: Synthetic) -> None:
        model.config["num_experts"] = EXPERTS
        model.bf16(f"{LAYER}.mlp.gate", experts, HIDDEN)

    return change


@pytest.mark.parametrize(
    ("config", "change", "found"),
    [
        ({}, bf16(), []),
        ({}, bf16(self_attn__o_proj=(64, 128)), ["self_attn.o_proj"]),
        ({}, bf16(self_attn__q_proj=(128, 64)), ["self_attn.q_proj"]),
        ({}, bf16(self_attn__k_proj=(32, HIDDEN)), ["self_attn.k_proj"]),
        ({"v_head_dim": 16}, bf16(self_attn__v_proj=(32, HIDDEN)), []),
        ({}, bf16(self_attn__q_proj=(96, HIDDEN)), ["self_attn.q_proj"]),
        ({}, bf16(self_attn__q_proj=(256, HIDDEN)), []),  # an output gate beside the query
        (HEADS, bf16(), []),
        (
            HEADS,
            bf16(self_attn__k_proj=(32, HIDDEN), self_attn__v_proj=(32, HIDDEN)),
            ["self_attn.k_proj", "self_attn.v_proj"],
        ),
        (HEADS | {"head_dim": 24}, bf16(), [f"self_attn.{leaf}_proj" for leaf in "koqv"]),
        (HEADS | {"global_head_dim": 64}, bf16(self_attn__k_proj=(32, HIDDEN), self_attn__v_proj=(32, HIDDEN)), []),
        (HEADS | {"linear_key_head_dim": 64}, bf16(self_attn__k_proj=(32, HIDDEN), self_attn__v_proj=(32, HIDDEN)), 2),
        ({}, fused(2 * INTER), []),
        ({}, fused(96), ["mlp.gate_up_proj"]),
        ({}, router(EXPERTS), []),
        ({}, router(EXPERTS + 1), ["mlp.gate"]),
        ({"zero_expert_num": 1}, router(EXPERTS + 1), []),  # LongCat routes to experts that do nothing
    ],
)
def test_each_view_alone(config, change, found, tmp_path):
    model = unquantised()
    model.config |= config
    change(model)
    names = sorted(wrong_shapes(model, tmp_path))
    assert len(names) == found if isinstance(found, int) else names == sorted(found)


def test_experts_behind_a_latent_projection_read_its_size(tmp_path):
    """Nemotron-3: routed experts work on `moe_latent_size`, and everything else on the hidden size."""
    model = unquantised()
    model.config |= {"num_experts": 2, "moe_latent_size": 64}
    for expert in range(2):
        model.bf16(f"{LAYER}.mlp.experts.{expert}.up_proj", INTER, 64)
        model.bf16(f"{LAYER}.mlp.experts.{expert}.down_proj", 64, INTER)
    assert wrong_shapes(model, tmp_path / "clean") == []
    model.bf16(f"{LAYER}.mlp.experts.1.up_proj", INTER, HIDDEN)
    assert wrong_shapes(model, tmp_path / "wrong") == ["mlp.experts.1.up_proj"]


def of_layers(rows: list[int]) -> Synthetic:
    """A model whose layers have MLPs of these widths, each right in itself."""
    model = unquantised()
    model.config["num_hidden_layers"] = len(rows)
    for layer, width in enumerate(rows):
        attention(model, f"model.layers.{layer}", fp4=False)
        mlp(model, f"model.layers.{layer}.mlp", fp4=False)
        for leaf, shape in (("gate_proj", (width, HIDDEN)), ("up_proj", (width, HIDDEN)), ("down_proj", (HIDDEN, width))):
            model.bf16(f"model.layers.{layer}.mlp.{leaf}", *shape)
    return model


@pytest.mark.parametrize(
    ("rows", "odd_layer"),
    [
        ([64, 64, 32, 64], 2),
        ([64, 32], None),  # which of two is wrong cannot be said
        ([64, 32, 64, 32], None),  # two of a kind are meant so
        ([64, 32, 96, 64], None),  # a searched architecture
    ],
)
def test_one_layer_alone_that_differs_is_found(rows, odd_layer, tmp_path):
    leaves = ("down_proj", "gate_proj", "up_proj") if odd_layer is not None else ()
    assert sorted(wrong_shapes(of_layers(rows), tmp_path)) == [f"model.layers.{odd_layer}.mlp.{leaf}" for leaf in leaves]


def test_of_projections_that_do_not_fit_the_rarest_size_is_named(tmp_path):
    model = of_layers([64, 64, 64])
    model.bf16("model.layers.1.self_attn.o_proj", HIDDEN, 96)
    assert wrong_shapes(model, tmp_path) == ["model.layers.1.self_attn.o_proj"]


def test_a_packed_weight_has_twice_the_columns_of_its_bytes(tmp_path):
    """bf16 and FP4 layers of one role have one size; a packed one that is half as wide has not."""
    model = qwen3_moe()
    for name in [name for name in model.tensors if name.startswith("model.layers.1.self_attn.o_proj.")]:
        del model.tensors[name]
    model.bf16("model.layers.1.self_attn.o_proj", HIDDEN, 128)
    model.ignore.append("model.layers.1.self_attn.o_proj")
    assert wrong_shapes(model, tmp_path / "clean") == []
    model.fp4("model.layers.2.self_attn.o_proj", HIDDEN, 64)
    assert wrong_shapes(model, tmp_path / "wrong") == ["model.layers.2.self_attn.o_proj"]
    assert LAYERS == 3


@pytest.mark.parametrize("entry", [r"re:model\.layers\.7\.cross", "LlamaRMSNorm", "vision_tower"])
def test_what_an_export_may_leave_out_is_no_finding_of_compressed_tensors(entry, tmp_path):
    """And lm_head, which no target names, needs no entry: SGLang does not ask for its class."""
    model = compressed_tensors()
    model.ignore[:] = [entry]
    assert audit(model.write(tmp_path)).findings == ()
