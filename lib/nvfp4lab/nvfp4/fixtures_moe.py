"""Turn a dense Llama into a mixture of experts that computes the same function, built so that routing errors show.

Architecture: Qwen2-MoE (routed experts, top-k, one shared expert with a sigmoid gate), the block that Qwen3.5-397B-A17B
uses too. Not Mixtral: with any ModelOpt quantisation SGLang swaps `MixtralForCausalLM` for `QuantMixtralForCausalLM`
(srt/model_loader/utils.py), whose experts are plain linear layers, so no fused MoE kernel would ever run.

Per layer the MLP's neurons are split: a third goes to every routed expert, the rest to the shared expert.
    dense(x) = sum over neurons = routed part + shared part
    moe(x)   = sum_topk(p_e * expert_e(x)) + sigmoid(0) * shared(x),   sum_topk(p_e) = 1
Copies alone would hide errors, so each expert holds its neurons in its own order and with its own power-of-two
split between `up` and `down`: one expert computes the same as another, while gate, up, down or a scale of one expert
used with those of another gives garbage. All factors are powers of two, hence exact in bf16.
"""

import dataclasses
from collections.abc import Iterator, Mapping

import torch

# Exponent of the factor moved from `down` into `up`, by expert: global scales then differ between experts.
_UP_EXPONENTS = (0, 1, -1, 2, -2, 3, -3, 1)


@dataclasses.dataclass(frozen=True)
class MoeShape:
    """Experts per layer, experts per token, and which share of the neurons is routed (1 of `split`)."""

    experts: int = 8
    top_k: int = 2
    split: int = 3
    seed: int = 20


def up_exponent(expert: int) -> int:
    """Expert `expert` has its up weights multiplied by 2**up_exponent and its down weights divided by it."""
    return _UP_EXPONENTS[expert % len(_UP_EXPONENTS)]


def routed_neurons(intermediate: int, shape: MoeShape) -> torch.Tensor:
    """Indices [intermediate/split] of the MLP neurons that the routed experts hold."""
    return torch.arange(0, intermediate, shape.split)


def neuron_order(layer: int, expert: int, intermediate: int, shape: MoeShape) -> torch.Tensor:
    """The routed neurons in the order in which this expert holds them; int64 [intermediate/split]."""
    generator = torch.Generator().manual_seed(shape.seed * 1_000_003 + layer * 1_009 + expert)
    neurons = routed_neurons(intermediate, shape)
    return neurons[torch.randperm(len(neurons), generator=generator)]


def to_moe(tensors: Mapping[str, torch.Tensor], layers: int, shape: MoeShape) -> dict[str, torch.Tensor]:
    """Qwen2-MoE tensors computing the function of the dense Llama `tensors` (bf16 in, bf16 out).

    Adds an untied `lm_head`: SGLang's Qwen2-MoE never ties it. Router weights are random: any routing is right.
    """
    result = {name: tensor for name, tensor in tensors.items() if ".mlp." not in name}
    result.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    for layer in range(layers):
        result.update(_moe_layer(tensors, f"model.layers.{layer}.mlp", layer, shape))
    return result


def _moe_layer(tensors: Mapping[str, torch.Tensor], prefix: str, layer: int, shape: MoeShape) -> Iterator[tuple[str, torch.Tensor]]:
    gate, up, down = (tensors[f"{prefix}.{name}_proj.weight"] for name in ("gate", "up", "down"))
    intermediate, hidden = gate.shape
    is_shared = torch.ones(intermediate, dtype=torch.bool)
    is_shared[routed_neurons(intermediate, shape)] = False
    yield f"{prefix}.shared_expert.gate_proj.weight", gate[is_shared].clone()
    yield f"{prefix}.shared_expert.up_proj.weight", up[is_shared].clone()
    yield f"{prefix}.shared_expert.down_proj.weight", down[:, is_shared] * 2  # undoes sigmoid(0) = 1/2
    yield f"{prefix}.shared_expert_gate.weight", gate.new_zeros(1, hidden)
    generator = torch.Generator().manual_seed(shape.seed + layer)
    yield f"{prefix}.gate.weight", (torch.randn(shape.experts, hidden, generator=generator) / hidden**0.5).to(gate.dtype)
    for expert in range(shape.experts):
        order = neuron_order(layer, expert, intermediate, shape)
        factor = 2.0 ** up_exponent(expert)
        yield f"{prefix}.experts.{expert}.gate_proj.weight", gate[order].clone()
        yield f"{prefix}.experts.{expert}.up_proj.weight", up[order] * factor
        yield f"{prefix}.experts.{expert}.down_proj.weight", down[:, order] / factor
