"""Kernels in plain torch whose arithmetic is chosen: the order in which products are added, and the accumulator's type.

They are what faults are injected into, what the false-alarm count runs over, and the reference backends. A kernel here
is a function `(problem, out) -> out`; `out` arrives poisoned and must be overwritten in full.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Literal

import torch

from nvfp4lab.kernels.operands import Activations, Fp4Operand, GemmProblem, MoeProblem, Problem
from nvfp4lab.kernels.shapes import BLOCK
from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.conventions import MODELOPT, Convention

Kernel = Callable[[Problem, torch.Tensor], torch.Tensor]
OrderName = Literal["sequential", "pairwise", "split_k", "blocked"]


@dataclasses.dataclass(frozen=True)
class Order:
    """How a dot product is added up.

    width: columns of a block ("blocked"), or number of parts ("split_k"); unused otherwise.
    accumulator: each partial sum is rounded to this type; inside a block of `width` the sum is fp32.
    truncates: fp32 partial sums are cut instead of rounded, as a tensor core may do.
    """

    name: OrderName
    width: int = 16
    accumulator: torch.dtype = torch.float32
    truncates: bool = False

    @property
    def label(self) -> str:
        width = str(self.width) if self.name in ("split_k", "blocked") else ""
        cut = "_truncating" if self.truncates else ""
        return f"{self.name}{width}{cut}" + (
            "" if self.accumulator is torch.float32 else f"_{str(self.accumulator).removeprefix('torch.')}"
        )


LEGITIMATE_ORDERS = (
    Order("sequential"),
    Order("pairwise"),
    Order("split_k", 2),
    Order("split_k", 4),
    *(Order("blocked", width) for width in (16, 32, 64, 128)),
    Order("blocked", 32, truncates=True),
)


def accumulate(left: torch.Tensor, right: torch.Tensor, order: Order) -> torch.Tensor:
    """left [M, K] x right [N, K]^T added up in `order`; fp32 [M, N].

    A product of two unscaled NVFP4 numbers has 12 significant bits, so in fp32 multiplication never rounds; only the
    additions differ between orders.
    """
    left, right = left.float(), right.float()
    if order.truncates:
        return _truncating(a @ b.T for a, b in zip(left.split(order.width, 1), right.split(order.width, 1), strict=True))
    if order.name == "sequential":
        return _sequential([left[:, k, None] * right[:, k] for k in range(left.shape[1])], order.accumulator)
    if order.name == "pairwise":
        return _pairwise([a @ b.T for a, b in zip(left.split(BLOCK, 1), right.split(BLOCK, 1), strict=True)])
    width = order.width if order.name == "blocked" else -(-left.shape[1] // order.width)
    return _sequential((a @ b.T for a, b in zip(left.split(width, 1), right.split(width, 1), strict=True)), order.accumulator)


def _sequential(terms, accumulator: torch.dtype) -> torch.Tensor:
    total = None
    for term in terms:
        total = term.to(accumulator) if total is None else (total.float() + term).to(accumulator)
    return total.float()


def _truncating(terms) -> torch.Tensor:
    total = 0.0
    for term in terms:
        exact = total + term.double()
        rounded = exact.float()
        too_far = rounded.double().abs() > exact.abs()
        total = torch.where(too_far, torch.nextafter(rounded, torch.zeros_like(rounded)), rounded).double()
    return total.float()


def _pairwise(terms: list[torch.Tensor]) -> torch.Tensor:
    while len(terms) > 1:
        terms = [sum(terms[i + 1 : i + 2], terms[i]) for i in range(0, len(terms), 2)]
    return terms[0]


def split_scale(activations: Activations) -> tuple[torch.Tensor, torch.Tensor | float]:
    """(unscaled values, global scale): bf16 activations have no global scale."""
    if isinstance(activations, Fp4Operand):
        return activations.unscaled(), activations.global_scale
    return activations.float(), 1.0


def gemm(problem: GemmProblem, out: torch.Tensor, order: Order = Order("blocked", 64)) -> torch.Tensor:
    """A dense FP4 GEMM: fp32 (or narrower) sum, times both global scales in fp32, one rounding to out's dtype."""
    left, left_scale = split_scale(problem.activations)
    alpha = left_scale * problem.weights.global_scale
    return out.copy_((accumulate(left, problem.weights.unscaled(), order) * alpha).to(out.dtype))


def moe(
    problem: MoeProblem, out: torch.Tensor, order: Order = Order("blocked", 64), activation=torch.nn.functional.silu
) -> torch.Tensor:
    """A gated fused MoE: both GEMMs in `order`; W4A4 requantises the intermediate, W4A16 rounds it to bf16."""
    total = torch.zeros(problem.out_shape, device=out.device)
    for local in range(problem.experts):
        token, slot = (problem.topk_ids == local + problem.expert_offset).nonzero(as_tuple=True)
        if token.numel():
            result = expert_mlp(problem, local, token, order, activation)
            total.index_add_(0, token, result * problem.topk_weights[token, slot, None])
    return out.copy_(total.to(out.dtype))


def expert_mlp(problem: MoeProblem, local: int, tokens: torch.Tensor, order: Order, activation) -> torch.Tensor:
    """fp32 [tokens, H]: what one local expert answers to the given tokens."""
    values, scale = split_scale(_take(problem.activations, tokens))
    gate, up, down = (operand.expert(local) for operand in (problem.gate, problem.up, problem.down))
    gate_out = accumulate(values, gate.unscaled(), order) * (scale * gate.global_scale)
    up_out = accumulate(values, up.unscaled(), order) * (scale * up.global_scale)
    hidden = activation(gate_out) * up_out
    if isinstance(problem.activations, Fp4Operand):
        inner, inner_scale = split_scale(requantise(hidden, problem.intermediate_scale))
    else:
        inner, inner_scale = hidden.bfloat16().float(), 1.0
    return accumulate(inner, down.unscaled(), order) * (inner_scale * down.global_scale)


def requantise(hidden: torch.Tensor, global_scale: torch.Tensor, convention: Convention = MODELOPT) -> Fp4Operand:
    """The intermediate as FP4 under `convention`. fp32 [rows, I]."""
    return Fp4Operand.of(codec.quantize(hidden.float().contiguous(), global_scale=global_scale, convention=convention))


def _take(activations: Activations, tokens: torch.Tensor) -> Activations:
    return activations.rows(tokens) if isinstance(activations, Fp4Operand) else activations[tokens]


def gemm_in(order: Order) -> Kernel:
    """`gemm` with its order fixed."""
    return functools.partial(gemm, order=order)


def moe_in(order: Order) -> Kernel:
    """`moe` with its order fixed."""
    return functools.partial(moe, order=order)
