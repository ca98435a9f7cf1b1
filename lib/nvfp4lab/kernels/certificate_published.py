"""The published checks before the same broken kernels, on the data that their own tests use: dense normal numbers."""

import dataclasses
import functools
from collections.abc import Iterable

import torch

from nvfp4lab.kernels import reference
from nvfp4lab.kernels.faults import Fault
from nvfp4lab.kernels.operands import GemmProblem, MoeProblem, Problem
from nvfp4lab.kernels.probes_realistic import plain_gemm, plain_moe
from nvfp4lab.kernels.published import PUBLISHED, PublishedGate
from nvfp4lab.kernels.reference import Kernel, Order
from nvfp4lab.kernels.reference_bounds import moe_value
from nvfp4lab.kernels.shapes import GemmShape, MoeShape

ORDER = Order("blocked", 64)  # of the kernel that faults are injected into


def sound_kernel(op: str, order: Order = ORDER) -> Kernel:
    """The CPU kernel of an operation in one order of addition."""
    return reference.gemm_in(order) if op == "gemm" else reference.moe_in(order)


@dataclasses.dataclass(frozen=True)
class _Ground:
    """What a published test compares with: float64 on the dequantised operands, and on the originals."""

    problem: Problem
    exact: torch.Tensor
    original: torch.Tensor


@functools.cache
def _ground(op: str) -> _Ground:
    if op == "gemm":
        problem: GemmProblem = plain_gemm(GemmShape(256, 512, 2048), seed=0)
        left, right = problem.original
        exact = problem.activations.value() @ problem.weights.value().T
        return _Ground(problem, exact, (left.bfloat16() @ right.bfloat16().T).double())
    moe_problem: MoeProblem = plain_moe(MoeShape(64, 256, 128, 8, 2), seed=0)
    exact = moe_value(moe_problem)
    return _Ground(moe_problem, exact, exact)


def let_through(faults: Iterable[Fault], published: tuple[PublishedGate, ...] = PUBLISHED) -> dict[str, tuple[str, ...]]:
    """For each published check, the faults that pass it on its own kind of data."""
    passed: dict[str, list[str]] = {gate.name: [] for gate in published}
    for fault in faults:
        if fault.indistinguishable:
            continue
        ground = _ground(fault.op)
        out = torch.zeros(ground.problem.out_shape, dtype=ground.problem.out_dtype)
        actual = fault.inject(sound_kernel(fault.op))(ground.problem, out)
        for gate in published:
            if fault.op in gate.ops and gate.passes(actual, ground.exact, ground.original):
                passed[gate.name].append(fault.name)
    return {name: tuple(names) for name, names in passed.items()}
