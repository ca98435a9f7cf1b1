"""Relations between two runs of one kernel. They need no reference, so they also hold where none is affordable.

All but `scale_doubling` run on exact inputs, on which even kernels that add in another order for another M must agree
to the bit. `scale_doubling` runs on realistic inputs: multiplying by two commutes with every rounding.
"""

import dataclasses
from collections.abc import Callable

import torch

from nvfp4lab.kernels import gates
from nvfp4lab.kernels.gates import GateResult
from nvfp4lab.kernels.operands import GemmProblem, MoeProblem, Problem, take_rows
from nvfp4lab.kernels.probes_draw import Draw
from nvfp4lab.records import Verdict

Run = Callable[[Problem], torch.Tensor]
REPEATS = 8


@dataclasses.dataclass(frozen=True)
class Relation:
    """pairs(run, problem, draw) yields (output, what it must equal). weighs: it needs a kernel that is given router weights."""

    name: str
    op: str
    detects: str
    pairs: Callable[[Run, Problem, Draw], list[tuple[torch.Tensor, torch.Tensor]]]
    on_realistic: bool = False
    weighs: bool = False

    def judge(self, run: Run, problem: Problem, seed: int) -> GateResult:
        """The first pair that differs, or OK."""
        result = GateResult(Verdict.OK)
        for actual, expected in self.pairs(run, problem, Draw(seed, problem.device)):
            if not torch.isfinite(expected).all():
                reason = f"{self.name}: the output itself holds NaN or Inf"
                return GateResult(Verdict.WRONG, reason, gates.WrongKind.NAN)
            result = gates.exact(actual, expected)
            if result.verdict is not Verdict.OK:
                return dataclasses.replace(result, reason=f"{self.name}: {result.reason}")
        return result


def _row_permutation(run: Run, problem: Problem, draw: Draw):
    order = draw.permutation(problem.out_shape[0])
    return [(run(take_rows(problem, order)), run(problem)[order])]


def _scale_doubling(run: Run, problem: GemmProblem, draw: Draw):
    doubled = dataclasses.replace(problem.weights, global_scale=problem.weights.global_scale * 2)
    return [(run(dataclasses.replace(problem, weights=doubled)), run(problem) * 2)]


def _batch_invariance(run: Run, problem: Problem, draw: Draw):
    whole = run(problem)
    rows = {0, problem.out_shape[0] - 1, int(draw.integers(0, problem.out_shape[0], (1,)))}
    return [(run(take_rows(problem, slice(row, row + 1))), whole[row : row + 1]) for row in sorted(rows)]


def _split_m(run: Run, problem: Problem, draw: Draw):
    half = (problem.out_shape[0] + 1) // 2
    parts = [run(take_rows(problem, part)) for part in (slice(0, half), slice(half, None)) if take_rows(problem, part).out_shape[0]]
    return [(torch.cat(parts), run(problem))]


def _repeat(run: Run, problem: Problem, draw: Draw):
    first = run(problem)
    return [(run(problem), first) for _ in range(REPEATS - 1)]


def _interleave(run: Run, problem: Problem, draw: Draw):
    """The same shape with other data in between: what a stale or shared buffer would give back."""
    other = take_rows(problem, torch.arange(problem.out_shape[0] - 1, -1, -1, device=problem.device))
    first = run(problem)
    between = run(other)
    return [(between, first.flip(0)), (run(problem), first)]


def _expert_relabelling(run: Run, problem: MoeProblem, draw: Draw):
    order = draw.permutation(problem.experts)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(problem.experts, device=order.device))
    local = problem.topk_ids.long() - problem.expert_offset
    here = (local >= 0) & (local < problem.experts)
    ids = torch.where(here, inverse[local.clamp(0, problem.experts - 1)] + problem.expert_offset, problem.topk_ids).to(torch.int32)
    parts = {name: getattr(problem, name).experts(order) for name in ("gate", "up", "down")}
    return [(run(dataclasses.replace(problem, topk_ids=ids, **parts)), run(problem))]


def _zero_expert(run: Run, problem: MoeProblem, draw: Draw):
    """An expert with weights of zero must act as if its routing weight were zero."""
    silent = int(draw.integers(0, problem.experts, (1,)))
    codes = problem.down.codes.clone()
    codes[silent] = 0
    zeroed = dataclasses.replace(problem, down=dataclasses.replace(problem.down, codes=codes))
    weights = problem.topk_weights.masked_fill(problem.topk_ids == silent + problem.expert_offset, 0.0)
    return [(run(zeroed), run(dataclasses.replace(problem, topk_weights=weights)))]


RELATIONS: tuple[Relation, ...] = (
    Relation("row_permutation", "gemm", "rows that see their neighbours or their own position", _row_permutation),
    Relation("scale_doubling", "gemm", "a global scale that is clipped, rounded or dropped", _scale_doubling, on_realistic=True),
    Relation("batch_invariance", "gemm", "another result for M = 1 than inside a batch", _batch_invariance),
    Relation("split_m", "gemm", "rows wrong in one batch size only", _split_m),
    Relation("repeat", "gemm", "races: output that changes between equal calls", _repeat),
    Relation("interleave", "gemm", "output or workspace left over from another call", _interleave),
    Relation("token_permutation", "moe", "tokens mixed up by the sort into experts", _row_permutation),
    Relation("token_batch_invariance", "moe", "another result for one token than inside a batch", _batch_invariance),
    Relation("expert_relabelling", "moe", "an expert whose number changes its answer", _expert_relabelling),
    Relation("zero_expert", "moe", "weights or scales taken from a neighbouring expert", _zero_expert, weighs=True),
    Relation("moe_repeat", "moe", "races: output that changes between equal calls", _repeat),
    Relation("moe_interleave", "moe", "output or workspace left over from another call", _interleave),
)
