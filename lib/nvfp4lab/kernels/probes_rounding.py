"""GEMM probes about the last step: how a sum becomes bf16, whether the global scale kept its bits, what becomes of small sums."""

import dataclasses

import torch

from nvfp4lab.kernels.operands import Fp4Operand, GemmProblem, ProbeError
from nvfp4lab.kernels.probes_draw import ALL_CODES, BINADE, SIX, Draw
from nvfp4lab.kernels.probes_exact import ACTIVATION_GLOBAL_SCALE, WEIGHT_GLOBAL_SCALE, ExactGemm, exact_gemm
from nvfp4lab.kernels.shapes import BLOCK, GemmShape


def rounding_gemm(shape: GemmShape, seed: int, device: torch.device | str = "cpu") -> ExactGemm:
    """Exact fp32 sums that bf16 cannot hold, with many ties: decides how the kernel rounds its output, and how often.

    All codes, no cancellation, block scales with mantissas in every other row of the weights. Each sum is exact in fp32 (below
    2^24 units), so round-to-nearest-even of it is the only right answer. Raises ProbeError where a large problem has no tie.
    """
    draw = Draw(seed, device)
    left, left_unit = _plain_side(draw, shape.m, shape.k, ACTIVATION_GLOBAL_SCALE, (8,))
    right, right_unit = _plain_side(draw, shape.n, shape.k, WEIGHT_GLOBAL_SCALE, BINADE)
    units = (left.value().abs() / left_unit) @ (right.value().abs() / right_unit).T
    if units.max().item() > 2**24:
        raise ProbeError(f"rounding probe: the sums of {shape.label} do not fit into fp32")
    exact = left.value() @ right.value().T
    ties = (exact.float().view(torch.int32) & 0xFFFF) == 0x8000
    if shape.m * shape.n >= 256 and not ties.any():
        raise ProbeError(f"rounding probe: no tie among the results of {shape.label}; it would prove nothing")
    return ExactGemm(GemmProblem(left, right), exact.float().to(torch.bfloat16), 24)


def _plain_side(draw: Draw, rows: int, k: int, global_scale: float, scales: tuple[int, ...]) -> tuple[Fp4Operand, torch.Tensor]:
    """Dense operand and the smallest step of each row, [rows, 1] float64. scales: block scales in eighths."""
    shape = (rows, k // BLOCK, BLOCK)
    codes = draw.choice(ALL_CODES, shape).scatter(-1, draw.integers(0, BLOCK, (*shape[:2], 1)), SIX) + draw.sign_bits(shape)
    row = draw.powers(-2, 3, (rows, 1))
    eighths = draw.choice(scales, (rows, k // BLOCK))
    eighths[::2] = 8  # every other row without mantissas: fewer significant bits, more ties
    block_scale = (row * eighths / 8).to(torch.float8_e4m3fn)
    operand = Fp4Operand(codes.reshape(rows, k).to(torch.uint8), block_scale, torch.tensor(global_scale, device=draw.device))
    return operand, 0.5 / (8 if len(scales) > 1 else 1) * global_scale * row


NOT_BF16 = 1.0 + 2.0**-8 - 2.0**-12  # just under the midpoint of two bf16 numbers: rounded to bf16 it falls to 1


def global_scale_gemm(shape: GemmShape, seed: int, device: torch.device | str = "cpu") -> ExactGemm:
    """An exact probe whose weights have a global scale that bf16 cannot hold. Its rounding alone moves many results.

    The sum is a small integer of units, so in fp32 the product with the global scale has one correct rounding; results that
    come to lie next to a tie of bf16 are avoided, by changing the seed. Raises ProbeError if that fails.
    """
    for attempt in range(8):
        probe = exact_gemm(shape, seed + 1000 * attempt, 8, device)
        weights = probe.problem.weights
        weights = dataclasses.replace(weights, global_scale=weights.global_scale * NOT_BF16)
        exact = probe.problem.activations.value() @ weights.value().T
        low_bits = exact.float().view(torch.int32) & 0xFFFF
        if not ((low_bits - 0x8000).abs() <= 4).any():
            return ExactGemm(dataclasses.replace(probe.problem, weights=weights), exact.float().bfloat16(), 8)
    raise ProbeError(f"global-scale probe: results of {shape.label} lie on ties of bf16")


SMALLER = 2.0**-7  # puts the results of the 24-bit tier at 2^-15 to 2^-3 of the weights' global scale


def small_results_gemm(shape: GemmShape, seed: int, device: torch.device | str = "cpu") -> ExactGemm:
    """The 24-bit tier with activations 128 times smaller: exact in bf16 as before, but small beside the global scale.

    A kernel that rounds its sum to the output type before it undoes a scaling of its own loses their bits: SGLang's Marlin
    carries a factor of 2^-119 until then, so on an H200 results below 2^-7 of the global scale were seen to lose bits.
    """
    probe = exact_gemm(shape, seed, 24, device)
    activations = probe.problem.activations
    smaller = dataclasses.replace(activations, global_scale=activations.global_scale * SMALLER)
    return ExactGemm(dataclasses.replace(probe.problem, activations=smaller), probe.expected * SMALLER, 24)
