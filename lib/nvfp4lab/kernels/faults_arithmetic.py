"""Wrong arithmetic for broken GEMM kernels: other roundings of the output, narrower accumulators, one ulp too many."""

from collections.abc import Callable

import torch

from nvfp4lab.kernels import reference
from nvfp4lab.kernels.faults import Inject, instead
from nvfp4lab.kernels.operands import GemmProblem, Problem
from nvfp4lab.kernels.reference import Kernel


def rounded_by(rounding: Callable[[torch.Tensor], torch.Tensor]) -> Inject:
    """fp32 result rounded to the output type in another way."""

    def broken(problem: GemmProblem, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(rounding(reference.gemm(problem, torch.empty(problem.out_shape, device=out.device))))

    return instead(broken)


def truncate_to_bf16(x: torch.Tensor) -> torch.Tensor:
    """fp32 cut to bf16 precision."""
    return (x.view(torch.int32) & -65536).view(torch.float32)


def ties_away(x: torch.Tensor) -> torch.Tensor:
    """fp32 rounded to bf16 precision, halves upwards in magnitude."""
    return truncate_to_bf16((x.view(torch.int32) + 0x8000).view(torch.float32))


def round_twice(x: torch.Tensor) -> torch.Tensor:
    """fp32 rounded first to 10 significant bits to nearest even, then to bf16: what an fp16-like intermediate does."""
    step = torch.exp2(torch.frexp(x)[1].float() - 10)
    return (torch.round(x / step) * step).bfloat16().float()


def _ulp_up(out: torch.Tensor) -> torch.Tensor:
    return (out.view(torch.int16) + 1).view(out.dtype)


def one_ulp(out: torch.Tensor, problem: Problem) -> None:
    """One output value moved to its neighbour."""
    row, column = out.shape[0] // 2, out.shape[1] // 3
    out[row, column] = _ulp_up(out[row, column : column + 1])[0]


def all_one_ulp(out: torch.Tensor, problem: Problem) -> None:
    """Every output value moved to its neighbour."""
    out.copy_(_ulp_up(out))


def narrow_accumulator(bits: int) -> Kernel:
    """Each partial sum rounded to `bits` significant bits (Hopper's FP8 tensor core keeps about 14)."""

    def broken(problem: GemmProblem, out: torch.Tensor) -> torch.Tensor:
        left, left_scale = reference.split_scale(problem.activations)
        total = torch.zeros(problem.out_shape, device=out.device)
        for a, b in zip(left.split(32, 1), problem.weights.unscaled().split(32, 1), strict=True):
            total = total + a @ b.T
            step = torch.exp2(torch.frexp(total)[1].float() - bits)
            total = torch.round(total / step) * step
        return out.copy_(total * (left_scale * problem.weights.global_scale))

    return broken
