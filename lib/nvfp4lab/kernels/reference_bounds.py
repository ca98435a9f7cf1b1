"""What the right answer is, in float64, and how far a sound kernel may be from it.

The bounds are derived, not tuned. Notation: u = 2^-24, the unit roundoff of fp32; n, the number of terms; S, the sum of the
terms' magnitudes. Adding n terms in any order errs by at most gamma_n S, gamma_n = n u / (1 - n u) (Higham, Accuracy
and Stability of Numerical Algorithms, 2nd ed., eq. 4.4). A tensor core may cut instead of rounding when it aligns
terms, which doubles u. Rounding the result to bf16 adds at most half an ulp of the binade it falls into.
"""

import math

import torch

from nvfp4lab.kernels.gates import Tolerance
from nvfp4lab.kernels.operands import Fp4Operand, GemmProblem, MoeProblem, ProbeError, activation_rows, activation_values
from nvfp4lab.kernels.reference import requantise
from nvfp4lab.kernels.shapes import BLOCK
from nvfp4lab.nvfp4.conventions import E2M1_MAX, E2M1_MIDPOINTS, E2M1_VALUES, E4M3_MAX, FLASHINFER, MODELOPT

UNIT_ROUNDOFF_FP32 = 2.0**-24
CUTTING = 2.0  # a tensor core that truncates when aligning: twice the error of rounding
HALF_ULP_BF16 = 2.0**-8  # relative, at the low end of a binade: 8 significant bits
SMALLEST_BF16 = 2.0**-133
CONFIDENCE = 1e-12  # probability with which the gain of a sound kernel may leave its bound


def gamma(terms: int) -> float:
    """gamma_n for n fp32 additions on hardware that may truncate."""
    x = terms * UNIT_ROUNDOFF_FP32 * CUTTING
    return x / (1 - x)


def gemm_expectation(problem: GemmProblem) -> tuple[torch.Tensor, Tolerance]:
    """(float64 result, tolerance). K terms of the sum, two multiplications by global scales, one rounding to bf16."""
    left, right = activation_values(problem.activations), problem.weights.value()
    expected = left @ right.T
    magnitude = left.abs() @ right.abs().T
    values = output_rounding(expected, gamma(left.shape[1] + 3) * magnitude)
    because = f"gamma_{left.shape[1] + 3} of the sum of magnitudes, plus half an ulp of bf16"
    return expected, Tolerance(values, gain_bound(expected, values), because)


def output_rounding(expected: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Bound after the result, off by at most `error`, is rounded to bf16 (half an ulp at the far end of the interval)."""
    _, exponent = torch.frexp(expected.abs() + error)  # magnitude in [2^(exponent - 1), 2^exponent)
    return error + torch.exp2(exponent.double() - 9) + SMALLEST_BF16


def gain_bound(expected: torch.Tensor, bound: torch.Tensor) -> float:
    """How far the least-squares gain <out, e> / <e, e> of a sound kernel may be from 1.

    Its error is sum(d_i e_i) / sum(e_i^2) with |d_i| <= bound_i. Round-to-nearest errors of unrelated values have mean
    zero and are as good as independent, so Hoeffding's inequality bounds the sum by sqrt(2 ln(2/p) sum(bound_i^2 e_i^2))
    but for a probability p. Truncation has a mean and is meant to fail here.
    """
    power = (expected * expected).sum().item()
    if power == 0:
        return 1.0
    return math.sqrt(2 * math.log(2 / CONFIDENCE) * ((bound * expected) ** 2).sum().item()) / power


def moe_value(problem: MoeProblem, lossless: bool = False) -> torch.Tensor:
    """The fused MoE in float64, [T, H].

    lossless: demand what makes an exact probe exact: SiLU saturated, the intermediate on the FP4 grid, in bf16 too,
    and all sums of magnitudes below 2^24 of their smallest unit. Raises ProbeError otherwise.
    """
    total = torch.zeros(problem.out_shape, dtype=torch.float64, device=problem.device)
    for local in range(problem.experts):
        token, slot = (problem.topk_ids == local + problem.expert_offset).nonzero(as_tuple=True)
        if token.numel() == 0:
            continue
        hidden = hidden_of_expert(problem, local, token)
        if lossless:
            hidden = _snapped(hidden, problem)
            _require_exact_sums(problem, local, token)
        elif isinstance(problem.activations, Fp4Operand):
            hidden = requantise(hidden, problem.intermediate_scale).value()
        answer = hidden @ problem.down.expert(local).value().T
        total.index_add_(0, token, answer * problem.topk_weights[token, slot, None].double())
    return total


def hidden_of_expert(problem: MoeProblem, local: int, tokens: torch.Tensor) -> torch.Tensor:
    """silu(gate) x up of one expert, float64 [tokens, I], before requantisation."""
    values = activation_values(activation_rows(problem.activations, tokens))
    gate = values @ problem.gate.expert(local).value().T
    up = values @ problem.up.expert(local).value().T
    return torch.nn.functional.silu(gate) * up


def _snapped(hidden: torch.Tensor, problem: MoeProblem) -> torch.Tensor:
    """The intermediate of an exact probe with SiLU's tails cut off; ProbeError where it would not survive requantisation."""
    snapped = torch.where(hidden.abs() < 1e-30, 0.0, hidden).float().double()  # SiLU saturates in fp32, not in fp64
    for convention in (MODELOPT, FLASHINFER):
        if not torch.equal(requantise(snapped, problem.intermediate_scale, convention).value(), snapped):
            raise ProbeError(f"exact MoE probe: requantising the intermediate loses something under {convention.name}'s convention")
    if not torch.equal(snapped.bfloat16().double(), snapped):
        raise ProbeError("exact MoE probe: the intermediate is not exact in bf16")
    return snapped


def _require_exact_sums(problem: MoeProblem, local: int, tokens: torch.Tensor) -> None:
    """ProbeError unless every partial sum of the first GEMM is exact in fp32: magnitudes add up to at most 2^24 steps."""
    rows = activation_rows(problem.activations, tokens)
    values, step = rows.unscaled(torch.float64).abs(), _row_step(rows)
    for part in (problem.gate, problem.up):
        weights = part.expert(local)
        steps = (values / step) @ (weights.unscaled(torch.float64).abs() / _row_step(weights)).T
        if steps.max().item() > 2**24:
            raise ProbeError(f"exact MoE probe: sums over {values.shape[1]} hidden values do not fit into fp32")


def _row_step(operand: Fp4Operand) -> torch.Tensor:
    """Largest power of two of which every value of a row is a multiple, [rows, 1] float64, without the global scale."""
    units = (operand.block_scale.double() * 2**9).long()  # 2^-9 is the smallest E4M3 number
    return 0.5 * (units & -units).amin(1, keepdim=True).double() / 2**9


SILU_SLOPE = 1.1  # |silu'| <= 1.0998 everywhere
FAST_EXP = 2.0**-20  # relative error allowed to a hardware exponential and division inside SiLU


def moe_expectation(problem: MoeProblem) -> tuple[torch.Tensor, Tolerance]:
    """(float64 result, tolerance) of a realistic MoE.

    Errors are carried through as intervals: gate and up each err by gamma_H and one rounding to bf16; SiLU stretches that by at
    most its slope; requantisation is monotone, so the code of h lies between the codes of both ends of h's interval, under
    both block scales that the interval of the block's amax allows; the second GEMM and the rounding of each expert's
    answer to bf16 follow as in `gemm_expectation`.
    """
    total = torch.zeros(problem.out_shape, dtype=torch.float64, device=problem.device)
    bound = torch.zeros_like(total)
    for local in range(problem.experts):
        token, slot = (problem.topk_ids == local + problem.expert_offset).nonzero(as_tuple=True)
        if token.numel():
            answer, error = _answer_interval(problem, local, token)
            weight = problem.topk_weights[token, slot, None].double()
            total.index_add_(0, token, answer * weight)
            bound.index_add_(0, token, error * weight.abs())
    values = output_rounding(total, bound + gamma(problem.topk_ids.shape[1] + 2) * total.abs())
    because = "interval arithmetic through both GEMMs, SiLU and the requantisation, plus half an ulp of bf16"
    return total, Tolerance(values, _row_gain_bound(total, values), because)


def _answer_interval(problem: MoeProblem, local: int, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    values = activation_values(activation_rows(problem.activations, tokens))
    (gate, gate_error), (up, up_error) = (_rounded_dot(values, part.expert(local).value()) for part in (problem.gate, problem.up))
    silu = torch.nn.functional.silu(gate)
    hidden = silu * up
    error = SILU_SLOPE * gate_error * (up.abs() + up_error) + silu.abs() * up_error + FAST_EXP * hidden.abs()
    if isinstance(problem.activations, Fp4Operand):
        inner, inner_error = _requantised_interval(hidden, error, problem.intermediate_scale.double())
    else:
        inner, inner_error = hidden, error + HALF_ULP_BF16 * (hidden.abs() + error)
    down = problem.down.expert(local).value()
    answer, answer_error = _rounded_dot(inner, down)
    return answer, answer_error + (1 + 2 * HALF_ULP_BF16) * (inner_error @ down.abs().T)


def _rounded_dot(left: torch.Tensor, right: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(left x right^T, bound on the error of its fp32 sum and one rounding to bf16)."""
    exact, magnitude = left @ right.T, left.abs() @ right.abs().T
    return exact, output_rounding(exact, gamma(left.shape[1] + 3) * magnitude)


def _requantised_interval(
    hidden: torch.Tensor, error: torch.Tensor, global_scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """(requantised value, how far another kernel's may be from it) for h known to +- error; [rows, I]."""
    centre = requantise(hidden, global_scale.float()).value()
    error = error + 4 * UNIT_ROUNDOFF_FP32 * hidden.abs()  # dividing by the scale
    blocks = hidden.abs().unflatten(-1, (-1, BLOCK)), error.unflatten(-1, (-1, BLOCK))
    ends = [(blocks[0] + sign * blocks[1]).amax(-1, keepdim=True).clamp_min(0) / (E2M1_MAX * global_scale) for sign in (-1, 1)]
    low, high = torch.full_like(hidden, math.inf), torch.full_like(hidden, -math.inf)
    for end in ends:
        scale = (
            (end.float().clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).double() * global_scale).expand(blocks[0].shape).flatten(-2)
        )
        low = torch.minimum(low, _grid((hidden - error), scale))
        high = torch.maximum(high, _grid((hidden + error), scale))
    return centre, torch.maximum(high - centre, centre - low).clamp_min(0)


def _grid(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The E2M1 multiple of `scale` next to x; 0 for a zero scale. Ties may go either way: x is the end of an interval."""
    magnitude = (x.abs() / scale.clamp_min(1e-300)).clamp(max=E2M1_MAX)
    index = torch.bucketize(magnitude, torch.tensor(E2M1_MIDPOINTS, dtype=x.dtype, device=x.device), right=False)
    return torch.tensor(E2M1_VALUES, dtype=x.dtype, device=x.device)[index] * scale * x.sign()


def _row_gain_bound(expected: torch.Tensor, bound: torch.Tensor) -> float:
    """`gain_bound` where errors inside a row hang together (one flipped intermediate code moves a whole row)."""
    power = (expected * expected).sum().item()
    if power == 0:
        return 1.0
    return math.sqrt(2 * math.log(2 / CONFIDENCE) * ((bound * expected).abs().sum(1) ** 2).sum().item()) / power
