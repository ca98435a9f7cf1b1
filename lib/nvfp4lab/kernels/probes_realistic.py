"""Realistic random inputs: what a layer of a real model looks like to a kernel, with outlier channels.

Activations: normal, a log-normal size for each token, and one channel in 64 larger by 20 to 60 times, as measured in
large language models (Dettmers et al., LLM.int8(), arXiv 2208.07339). Weights: normal, a size for each output channel.
Both are quantised by the codec, with the global scale that puts the largest block scale at 448.
"""

import dataclasses

import torch

from nvfp4lab.kernels.operands import Fp4Operand, GemmProblem, MoeProblem
from nvfp4lab.kernels.probes_draw import Draw
from nvfp4lab.kernels.reference_bounds import hidden_of_expert
from nvfp4lab.kernels.shapes import GemmShape, MoeShape
from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.conventions import E2M1_MAX, E4M3_MAX

OUTLIER_EVERY = 64


def realistic_gemm(shape: GemmShape, seed: int, device: torch.device | str = "cpu") -> GemmProblem:
    """A dense layer; `original` holds both operands before quantisation."""
    draw = Draw(seed, device)
    left, right = _activations(draw, shape.m, shape.k), _weights(draw, shape.n, shape.k)
    return GemmProblem(_quantised(left), _quantised(right), original=(left, right))


def realistic_moe(shape: MoeShape, seed: int, device: torch.device | str = "cpu") -> MoeProblem:
    """A MoE layer, its router softmax-like; the intermediate's global scale comes from the data."""
    draw = Draw(seed, device)
    activations = _quantised(_activations(draw, shape.tokens, shape.hidden))
    parts = [(shape.intermediate, shape.hidden), (shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)]
    gate, up, down = (Fp4Operand.stack([_quantised(_weights(draw, *part)) for _ in range(shape.experts)]) for part in parts)
    shared = torch.maximum(gate.global_scale, up.global_scale)  # a fused pair is quantised with one global scale
    logits = draw.normal((shape.tokens, shape.all_experts))
    weights, ids = logits.softmax(-1).topk(shape.topk)
    problem = MoeProblem(
        activations,
        dataclasses.replace(gate, global_scale=shared),
        dataclasses.replace(up, global_scale=shared),
        down,
        ids.to(torch.int32),
        weights / weights.sum(-1, keepdim=True),
        torch.tensor(1.0, device=draw.device),
        shape.expert_offset,
        shape.all_experts,
    )
    return _calibrated(problem)


def _calibrated(problem: MoeProblem) -> MoeProblem:
    """The intermediate's global scale as calibration on these very tokens would set it (the first four experts suffice)."""
    tokens = torch.arange(problem.out_shape[0], device=problem.device)
    amax = max(hidden_of_expert(problem, local, tokens).abs().max().item() for local in range(min(problem.experts, 4)))
    return dataclasses.replace(problem, intermediate_scale=torch.tensor(amax / (E2M1_MAX * E4M3_MAX), device=problem.device))


def _activations(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    size = torch.exp(0.5 * draw.normal((rows, 1)))
    channel = torch.ones(columns, device=draw.device)
    outliers = draw.permutation(columns)[: max(1, columns // OUTLIER_EVERY)]
    channel[outliers] = 20.0 + 40.0 * torch.rand(outliers.numel(), generator=draw.generator, device=draw.device)
    return draw.normal((rows, columns)) * size * channel


def _weights(draw: Draw, rows: int, columns: int) -> torch.Tensor:
    return draw.normal((rows, columns)) * torch.exp(0.3 * draw.normal((rows, 1))) / columns**0.5


def _quantised(x: torch.Tensor) -> Fp4Operand:
    return Fp4Operand.of(codec.quantize(x))


def plain_gemm(shape: GemmShape, seed: int, device: torch.device | str = "cpu") -> GemmProblem:
    """Dense standard normal operands, quantised: what published tests feed their kernels. Not a probe of ours."""
    draw = Draw(seed, device)
    left, right = draw.normal((shape.m, shape.k)), draw.normal((shape.n, shape.k))
    return GemmProblem(_quantised(left), _quantised(right), original=(left, right))


def plain_moe(shape: MoeShape, seed: int, device: torch.device | str = "cpu") -> MoeProblem:
    """A MoE of normal activations and weights, sized as published tests do (weights / 10), so that outputs are of order 1."""
    problem = realistic_moe(shape, seed, device)
    draw = Draw(seed, device)
    activations = _quantised(draw.normal((shape.tokens, shape.hidden)))
    return _calibrated(dataclasses.replace(problem, activations=activations))
