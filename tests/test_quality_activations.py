"""Rounded activations: which scale each layer gets, what it computes, and that nothing else changes."""

from pathlib import Path

import pytest
import torch
from torch import nn

from audit_synthesis import EXPERTS, HIDDEN, INTER, LAYERS, qwen3_moe
from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4 import codec
from nvfp4lab.server import quality_activations
from nvfp4lab.server.quality_activations import round_activations

WIDTHS = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 128}


def qwen2_moe_experts() -> nn.Module:
    from transformers.models.qwen2_moe import configuration_qwen2_moe, modeling_qwen2_moe

    config = configuration_qwen2_moe.Qwen2MoeConfig(
        hidden_size=HIDDEN, moe_intermediate_size=INTER, num_experts=EXPERTS, num_attention_heads=2, num_key_value_heads=1
    )
    experts = modeling_qwen2_moe.Qwen2MoeExperts(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return experts


def model() -> nn.Module:
    """The modules of the synthetic Qwen3-MoE under their paths."""
    layers = nn.ModuleList()
    for _ in range(LAYERS):
        attention = nn.ModuleDict({leaf: nn.Linear(HIDDEN, n, bias=False) for leaf, n in WIDTHS.items()})
        mlp = nn.ModuleDict({"gate": nn.Linear(HIDDEN, EXPERTS, bias=False), "experts": qwen2_moe_experts()})
        layers.append(nn.ModuleDict({"self_attn": attention, "mlp": mlp}))
    return nn.ModuleDict({"model": nn.ModuleDict({"layers": layers})})


def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
    return codec.dequantize(codec.quantize(x, global_scale=scale), x.dtype)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(6, HIDDEN, generator=torch.Generator().manual_seed(1))


def test_fused_projections_share_the_largest_input_scale(x: torch.Tensor, tmp_path: Path) -> None:
    checkpoint = qwen3_moe()
    checkpoint.scalar("model.layers.1.self_attn.k_proj.input_scale", 0.05)
    ours = model()
    assert round_activations(ours, checkpoint.write(tmp_path)) == LAYERS * (4 + 1)
    for leaf, scale in (("q_proj", 0.05), ("k_proj", 0.05), ("o_proj", 0.02)):
        linear = ours["model"]["layers"][1]["self_attn"][leaf]
        assert torch.equal(linear(x), nn.functional.linear(rounded(x, scale), linear.weight))
        assert not torch.equal(linear(x), nn.functional.linear(x, linear.weight))
    router = ours["model"]["layers"][1]["mlp"]["gate"]
    assert torch.equal(router(x), nn.functional.linear(x, router.weight))


def test_experts_round_both_inputs_with_the_largest_scale_of_the_layer(x: torch.Tensor, tmp_path: Path) -> None:
    checkpoint = qwen3_moe()
    checkpoint.scalar("model.layers.0.mlp.experts.3.up_proj.input_scale", 0.03)
    checkpoint.scalar("model.layers.0.mlp.experts.1.down_proj.input_scale", 0.07)
    ours = model()
    round_activations(ours, checkpoint.write(tmp_path))
    experts = ours["model"]["layers"][0]["mlp"]["experts"]
    index, weights = torch.tensor([[0, 2], [1, 3], [2, 1], [3, 0], [0, 1], [1, 2]]), torch.rand(6, 2)
    expected = torch.zeros_like(x)
    for token in range(6):
        for place in range(2):
            e = index[token, place]
            gate, up = (experts.gate_up_proj[e] @ rounded(x[token : token + 1], 0.03)[0]).chunk(2)
            inner = rounded((nn.functional.silu(gate) * up)[None], 0.07)[0]
            expected[token] += weights[token, place] * (experts.down_proj[e] @ inner)
    assert torch.allclose(experts(x, index, weights), expected, atol=1e-5)


def test_experts_without_rounding_are_transformers_own(x: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, weights = torch.tensor([[0, 2], [1, 3], [2, 1], [3, 0], [0, 1], [1, 2]]), torch.rand(6, 2)
    theirs = qwen2_moe_experts()(x, index, weights)
    monkeypatch.setattr(quality_activations, "_rounded", lambda x, scale: x)
    ours = model()
    round_activations(ours, qwen3_moe().write(tmp_path))
    assert torch.allclose(ours["model"]["layers"][0]["mlp"]["experts"](x, index, weights), theirs, atol=1e-5)


def test_a_layer_that_the_model_lacks_is_named(tmp_path: Path) -> None:
    ours = model()
    del ours["model"]["layers"][2]
    with pytest.raises(LabError, match=r"layers\.2"):
        round_activations(ours, qwen3_moe().write(tmp_path))
