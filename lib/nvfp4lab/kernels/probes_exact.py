"""Exact GEMM probes: inputs on which every correct kernel, in any accumulation order, returns the same bits.

The K dimension is a row of 16-wide blocks. Blocks come in pairs (j, j'): for each column the partner's activation is r times
the first one, r in {1, 2, 1/2, 3/2, 2/3}, and its weight is -1/r times, so the products cancel whatever the values; block
scales are moved within a pair likewise. A decoder that is wrong about one code or one mantissa everywhere thus breaks
the balance too. One or two *signal* blocks are left over and small. Hence
    - every product is an integer multiple of one unit, and the sum of their magnitudes stays below 2^tier units, so
      each partial sum in each order is exact in an accumulator of `tier` bits;
    - the result is below 2^8 units, so bf16 holds it exactly, and *any* wrong code, scale or dropped term moves it by
      at least one unit and cannot hide behind the output rounding.
Every activation block holds one code of magnitude 6, so quantising the dequantised activations gives them back.
"""

import dataclasses

import torch

from nvfp4lab.kernels.operands import Fp4Operand, GemmProblem, ProbeError
from nvfp4lab.kernels.probes_draw import ALL_CODES, BINADE, SIX, Draw
from nvfp4lab.kernels.shapes import BLOCK, GemmShape

ACTIVATION_GLOBAL_SCALE = 2.0**4
WEIGHT_GLOBAL_SCALE = 2.0**-4


@dataclasses.dataclass(frozen=True)
class Tier:
    """How large the partial sums of a probe may grow, and which codes and scales fill that budget.

    bits: sum of |product| <= 2^bits units.
    activation_codes, weight_codes: magnitudes as indices into E2M1 (1 is 0.5, 7 is 6.0), drawn evenly.
    activation_scales, weight_scales: block scales in eighths, drawn evenly; 8..15 is one full E4M3 binade.
    ratios: which CODE_RATIOS both sets of codes allow.
    """

    bits: int
    activation_codes: tuple[int, ...]
    weight_codes: tuple[int, ...]
    activation_scales: tuple[int, ...] = (8,)
    weight_scales: tuple[int, ...] = (8,)
    ratios: tuple[int, ...] = (0,)


TIERS = {
    8: Tier(8, (0, 1), (1,)),
    13: Tier(13, (1, 2, 3), (1, 2, 3, 4), ratios=(0, 1, 2, 3, 4)),
    24: Tier(24, ALL_CODES, ALL_CODES, BINADE, BINADE, ratios=(0, 1, 2, 3, 4)),
}


@dataclasses.dataclass(frozen=True)
class ExactGemm:
    """A problem, its only right answer, and the accumulator width that it asks for."""

    problem: GemmProblem
    expected: torch.Tensor
    bits: int


# (code, partner's code) of each ratio; 0.5 is code 1, 6.0 is code 7.
CODE_RATIOS = (
    tuple((code, code) for code in range(8)),
    ((1, 2), (2, 4), (3, 5), (4, 6), (5, 7)),
    ((2, 1), (4, 2), (5, 3), (6, 4), (7, 5)),
    ((2, 3), (4, 5), (6, 7)),
    ((3, 2), (5, 4), (7, 6)),
)
INVERSE_RATIO = (0, 2, 1, 4, 3)
# (scale, partner's scale) in eighths.
SCALE_RATIOS = (
    tuple((scale, scale) for scale in BINADE),
    ((8, 12), (10, 15)),
    ((12, 8), (15, 10)),
    ((8, 10), (12, 15)),
    ((10, 8), (15, 12)),
)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """What both operands share: how values move between the two halves of each pair, and where blocks go along K.

    code_ratio: [pairs, 16], index into CODE_RATIOS; scale_ratio: [pairs], into SCALE_RATIOS; exponents: [pairs], the
    partner's scale is 2^exponent larger still; flips: [pairs, 16], 0 or 8; order: [blocks].
    """

    pairs: int
    signals: int
    code_ratio: torch.Tensor
    scale_ratio: torch.Tensor
    exponents: torch.Tensor
    flips: torch.Tensor
    order: torch.Tensor

    @classmethod
    def draw(cls, k: int, tier: Tier, draw: Draw) -> "_Plan":
        blocks = k // BLOCK
        pairs = (blocks - 1) // 2
        # Four columns of each block keep ratio 1: there a 6 may stand in both halves.
        varied = draw.orders((pairs, BLOCK)) >= 4
        code_ratio = draw.choice(tier.ratios, (pairs, BLOCK)) * varied
        scale_ratio = draw.integers(0, len(SCALE_RATIOS), (pairs,)) * (len(tier.activation_scales) > 1)
        flips = draw.sign_bits((pairs, BLOCK))
        exponents, order = draw.integers(-1, 2, (pairs,)), draw.permutation(blocks)
        return cls(pairs, blocks - 2 * pairs, code_ratio, scale_ratio, exponents, flips, order)

    def inverse(self) -> "_Plan":
        """The plan as the weights see it: 1/r for r, and the opposite sign."""
        inverse = torch.tensor(INVERSE_RATIO, device=self.order.device)
        return dataclasses.replace(
            self,
            code_ratio=inverse[self.code_ratio],
            scale_ratio=inverse[self.scale_ratio],
            exponents=-self.exponents,
            flips=self.flips ^ 8,
        )

    def join(self, first: torch.Tensor, second: torch.Tensor, signal: torch.Tensor) -> torch.Tensor:
        """[rows, pairs, ...] twice and [rows, signals, ...] as one [rows, blocks, ...] in the planned order."""
        return torch.cat([first, second, signal], dim=1)[:, self.order]


@dataclasses.dataclass(frozen=True)
class _Side:
    """One operand under construction. unit: [rows] float64, the smallest step of each row's signal values."""

    operand: Fp4Operand
    unit: torch.Tensor


def exact_gemm(
    shape: GemmShape, seed: int, bits: int, device: torch.device | str = "cpu", bf16_activations: bool = False
) -> ExactGemm:
    """Exact probe of one tier (8, 13 or 24 bits) for `shape`; K must be a multiple of 16.

    bf16_activations: full 8-bit significands that only a weight-only (W4A16) kernel can take. Raises ProbeError.
    """
    if shape.k % BLOCK or min(shape.m, shape.n, shape.k) < 1:
        raise ProbeError(f"exact probe: K must be a positive multiple of {BLOCK}, M and N positive; got {shape.label}")
    tier, draw = TIERS[bits], Draw(seed, device)
    plan = _Plan.draw(shape.k, tier, draw)
    if bf16_activations:
        plan = dataclasses.replace(plan, code_ratio=plan.code_ratio * 0, scale_ratio=plan.scale_ratio * 0)
        activations, left, left_unit = _bf16_activations(plan, draw, shape.m)
    else:
        side = _activations(plan, tier, draw, shape.m)
        activations, left, left_unit = side.operand, side.operand.value(), side.unit
    weights = _weights_within_budget(plan, tier, draw, shape.n, left.abs() / left_unit[:, None])
    exact = left @ weights.value().T
    expected = exact.to(torch.bfloat16)
    if not torch.equal(expected.double(), exact):
        raise ProbeError(f"exact probe: the result of {shape.label} is not exact in bf16")
    return ExactGemm(GemmProblem(activations, weights), expected, bits)


def _weights_within_budget(plan: _Plan, tier: Tier, draw: Draw, n: int, left_units: torch.Tensor) -> Fp4Operand:
    """Weights with as many nonzero pairs of blocks a row as the tier's budget allows.

    left_units: float64 [M, K], magnitudes of the activations in units.
    """
    kept = plan.pairs
    while kept >= 0:
        side = _weights(plan, tier, draw, n, kept)
        units = (left_units @ (side.operand.value().abs() / side.unit[:, None]).T).max().item()
        if units <= 2**tier.bits:
            return side.operand
        kept = min(kept - 1, int(kept * 2**tier.bits / units))
    raise ProbeError(f"exact probe: K = {plan.order.numel() * BLOCK} does not fit into 2^{tier.bits} units")


def _activations(plan: _Plan, tier: Tier, draw: Draw, m: int) -> _Side:
    first, second = _code_pairs(plan, draw, tier.activation_codes, m)
    # One 6 in each block and its partner: the block's amax then names its scale without rounding.
    place = torch.where(plan.code_ratio == 0, draw.orders((m, plan.pairs, BLOCK)) + 1, 0).argmax(-1, keepdim=True)
    first, second = first.scatter(-1, place, SIX), second.scatter(-1, place, SIX)
    signs = draw.sign_bits((m, plan.pairs, BLOCK))
    signal = _with_six(draw, draw.choice(tuple(c for c in tier.activation_codes if c <= 3), (m, plan.signals, BLOCK)))
    return _side(plan, draw, tier.activation_scales, ACTIVATION_GLOBAL_SCALE, first + signs, second + (signs ^ plan.flips), signal)


def _weights(plan: _Plan, tier: Tier, draw: Draw, n: int, kept: int) -> _Side:
    """`kept` pairs of each row are dense, the others zero; which ones differs by row."""
    plan = plan.inverse()
    first, second = _code_pairs(plan, draw, tier.weight_codes, n)
    signs = draw.sign_bits((n, plan.pairs, BLOCK))
    off = (draw.orders((n, plan.pairs)) >= kept)[..., None]
    first, second = (first + signs).masked_fill(off, 0), (second + (signs ^ plan.flips)).masked_fill(off, 0)
    signal = 1 + draw.sign_bits((n, plan.signals, BLOCK))
    return _side(plan, draw, tier.weight_scales, WEIGHT_GLOBAL_SCALE, first, second, signal)


def _code_pairs(plan: _Plan, draw: Draw, codes: tuple[int, ...], rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Magnitude codes [rows, pairs, 16] of both halves, drawn evenly from `codes`, each column in its ratio."""
    shape = (rows, plan.pairs, BLOCK)
    return _drawn_pairs(draw, CODE_RATIOS, plan.code_ratio.expand(shape), lambda a, b: a in codes and b in codes)


def _drawn_pairs(draw: Draw, ratios, which: torch.Tensor, allowed) -> tuple[torch.Tensor, torch.Tensor]:
    """For each element of `which` (an index into `ratios`), one allowed (value, partner's value) of that ratio."""
    first, second = torch.zeros_like(which), torch.zeros_like(which)
    for index, pairs in enumerate(ratios):
        choice = tuple(pair for pair in pairs if allowed(*pair))
        if not choice:
            continue  # no column of the plan asks for it
        picked = draw.integers(0, len(choice), tuple(which.shape))
        table = torch.tensor(choice, device=draw.device)
        first = torch.where(which == index, table[picked, 0], first)
        second = torch.where(which == index, table[picked, 1], second)
    return first, second


def _with_six(draw: Draw, magnitudes: torch.Tensor) -> torch.Tensor:
    """Random signs, and one code of magnitude 6 in each block: its amax then names the block scale without rounding."""
    codes = magnitudes.scatter(-1, draw.integers(0, BLOCK, (*magnitudes.shape[:-1], 1)), SIX)
    return codes + draw.sign_bits(tuple(codes.shape))


def _side(plan: _Plan, draw: Draw, scales, global_scale: float, first, second, signal) -> _Side:
    """Codes and scales of one operand. Rows differ by a random power of two, so that rows of scales cannot be mixed up."""
    rows = first.shape[0]
    row = draw.powers(-4, 1, (rows, 1))  # down to 2^-7: E4M3 subnormals are among the scales
    low = (1 if len(scales) > 1 else 8) / 8
    which = plan.scale_ratio.expand(rows, plan.pairs)
    one, two = _drawn_pairs(draw, SCALE_RATIOS, which, lambda a, b: a in scales and b in scales)
    signals = torch.full((rows, plan.signals), low, device=draw.device).double()
    block = plan.join(one / 8.0, two / 8.0 * torch.exp2(plan.exponents.double()), signals).double() * row
    codes = plan.join(first, second, signal).reshape(rows, -1).to(torch.uint8)
    operand = Fp4Operand(codes, block.to(torch.float8_e4m3fn), torch.tensor(global_scale, device=draw.device))
    if not torch.equal(operand.block_scale.double(), block):
        raise ProbeError("exact probe: a block scale is not an E4M3 number")
    return _Side(operand, (0.5 * low * global_scale * row)[:, 0])


def _bf16_activations(plan: _Plan, draw: Draw, m: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(bf16 [M, K], the same in float64, unit [M]): odd integers of 8 bits, the signal of 2 bits, times a power of two a row."""
    unit = draw.powers(-1, 3, (m,))
    sign = 1 - 2 * draw.integers(0, 2, (m, plan.pairs, BLOCK))
    first = (2 * draw.integers(0, 128, (m, plan.pairs, BLOCK)) + 1) * sign
    second = first * torch.where(plan.flips > 0, -1.0, 1.0) * torch.exp2(plan.exponents.double())[:, None]
    signal = draw.integers(1, 4, (m, plan.signals, BLOCK)) * (1 - 2 * draw.integers(0, 2, (m, plan.signals, BLOCK)))
    exact = plan.join(first.double(), second, signal.double()).reshape(m, -1) * unit[:, None]
    return exact.to(torch.bfloat16), exact, unit
