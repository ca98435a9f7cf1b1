"""A broken kernel as data: a fault takes a right kernel and returns one that is wrong in one way.

The classes themselves are in `faults_gemm` and `faults_moe`.
"""

import dataclasses
from collections.abc import Callable

import torch

from nvfp4lab.kernels.operands import Fp4Operand, Problem
from nvfp4lab.kernels.reference import Kernel

Inject = Callable[[Kernel], Kernel]


@dataclasses.dataclass(frozen=True)
class Fault:
    """inject(kernel) -> broken kernel, with fresh state on each call.

    source: a bug report, or the class of mistake. indistinguishable: set where no gate may tell it from a sound kernel; why.
    """

    name: str
    op: str
    source: str
    inject: Inject
    indistinguishable: str = ""


def on_output(edit: Callable[[torch.Tensor, Problem], None]) -> Inject:
    """A kernel whose output is edited in place."""

    def inject(kernel: Kernel) -> Kernel:
        def broken(problem: Problem, out: torch.Tensor) -> torch.Tensor:
            result = kernel(problem, out)
            edit(result, problem)
            return result

        return broken

    return inject


def on_problem(edit: Callable[[Problem], Problem]) -> Inject:
    """A kernel that reads other inputs than it was given."""
    return lambda kernel: lambda problem, out: kernel(edit(problem), out)


def instead(replacement: Kernel) -> Inject:
    """A kernel with other arithmetic."""
    return lambda kernel: replacement


def on_weights(edit: Callable[[Fp4Operand], Fp4Operand]) -> Inject:
    """A kernel that misreads its weights."""
    return on_problem(lambda problem: dataclasses.replace(problem, weights=edit(problem.weights)))


def on_activations(edit: Callable[[Fp4Operand], Fp4Operand]) -> Inject:
    """A kernel that misreads its FP4 activations."""
    return on_problem(lambda problem: dataclasses.replace(problem, activations=edit(problem.activations)))


def with_codes(operand: Fp4Operand, edit: Callable[[torch.Tensor], torch.Tensor]) -> Fp4Operand:
    """The operand with its codes edited (a copy)."""
    return dataclasses.replace(operand, codes=edit(operand.codes.clone()))


def with_scales(operand: Fp4Operand, edit: Callable[[torch.Tensor], torch.Tensor]) -> Fp4Operand:
    """The operand with its block scales edited (a float32 copy, rounded back to E4M3)."""
    return dataclasses.replace(operand, block_scale=edit(operand.block_scale.float()).to(torch.float8_e4m3fn))


def scaled(operand: Fp4Operand, factor: float) -> Fp4Operand:
    """The operand with another global scale."""
    return dataclasses.replace(operand, global_scale=operand.global_scale * factor)


def one_wrong_code(codes: torch.Tensor) -> torch.Tensor:
    """The middle code replaced by its neighbour in magnitude."""
    middle = tuple(size // 2 for size in codes.shape)
    codes[middle] ^= 1
    return codes


def one_wrong_scale(scales: torch.Tensor) -> torch.Tensor:
    """The middle block scale doubled."""
    middle = tuple(size // 2 for size in scales.shape)
    scales[middle] *= 2
    return scales


def one_value(value: float) -> Inject:
    """The middle value of the output replaced."""

    def edit(out: torch.Tensor, problem: Problem) -> None:
        out.view(-1)[out.numel() // 2] = value

    return on_output(edit)
