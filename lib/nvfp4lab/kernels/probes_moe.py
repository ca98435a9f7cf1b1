"""Exact fused-MoE probes: every intermediate is known to the bit, so the output is unique.

First GEMM. Pairs of hidden blocks cancel as in `probes_exact`; in one signal block a token holds 6 and 2 at positions
p and p+8 (p: the token's pattern, 0..15), so `up` is 8 x the code that its expert keeps for that pattern, and `gate`
is 32 or 64, or -128 for the neurons that are off under that pattern. SiLU is the identity in fp32 from 17 on and 0 at -128.
Intermediate. gate x up is a power of two times an E2M1 value, and each block of 16 neurons holds one 6: requantising it
is lossless under every convention, and bf16 holds it exactly as well.
Second GEMM. Neuron blocks come in pairs that cancel; one signal block gives each expert its own small integers.
Routing weights are powers of two, so the weighted sum is exact in any order too.
"""

import dataclasses

import torch

from nvfp4lab.kernels.operands import Fp4Operand, MoeProblem, ProbeError, take_rows
from nvfp4lab.kernels.probes_draw import ALL_CODES, BINADE, SIX, Draw
from nvfp4lab.kernels.reference_bounds import moe_value
from nvfp4lab.kernels.shapes import BLOCK, MoeShape

PATTERNS = 8  # distinct answers of an expert; positions p and p + 8 of the signal block share one
ACTIVATION_GLOBAL_SCALE = 2.0**-2
WEIGHT_GLOBAL_SCALE = 2.0**2  # times the one of the activations: 1, so that gate and up are what the docstring says
INTERMEDIATE_GLOBAL_SCALE = 2.0**4
GATE_SCALE = 4.0  # block scale of the gate's answers: codes 1, 2 and -4 give 32, 64 and -128
ONE, TWO, FOUR = 2, 4, 6  # codes of 1.0, 2.0 and 4.0


@dataclasses.dataclass(frozen=True)
class ExactMoe:
    """A problem and its only right answer."""

    problem: MoeProblem
    expected: torch.Tensor


def exact_moe(
    shape: MoeShape,
    seed: int,
    device: torch.device | str = "cpu",
    gate_up_ratio: float = 1.0,
    skewed: bool = False,
    small: bool = False,
    even: bool = False,
) -> ExactMoe:
    """Exact probe for `shape`; hidden and intermediate must be multiples of 16.

    gate_up_ratio: global scale of `up` over that of `gate`, a power of two; anything but 1 is a checkpoint whose fused
    pair was quantised apart. skewed: every token asks the same experts, the others stay empty. small: the weights that
    cancel are zero, so that partial sums fit bf16 and a kernel that adds them up in bf16 must be right as well. even: router
    weights that a softmax can give exactly: 2^n of the experts asked share alike, the others of them get nothing.
    Raises ProbeError where the probe's own invariants fail.
    """
    if shape.hidden % BLOCK or shape.intermediate % BLOCK or shape.topk > shape.all_experts:
        raise ProbeError(
            f"exact MoE probe: hidden and intermediate must be multiples of {BLOCK} and top-k <= experts, got {shape.label}"
        )
    draw = Draw(seed, device)
    exponents = draw.integers(-1, 2, ((shape.hidden // BLOCK - 1) // 2,))
    flips = draw.sign_bits((exponents.numel(), BLOCK))
    order = draw.permutation(shape.hidden // BLOCK)
    activations = _activations(draw, shape, flips, exponents, order)
    row = draw.powers(-1, 2, (shape.hidden, 1))  # rows of `down` differ, alike in all experts: their answers are added up
    experts = [
        _expert(draw, shape, flips, exponents, order, row, index, gate_up_ratio, not small) for index in range(shape.experts)
    ]
    gate, up, down = (Fp4Operand.stack([expert[part] for expert in experts]) for part in range(3))
    ids, weights = _routing(draw, shape, skewed, even)
    problem = MoeProblem(
        activations,
        gate,
        up,
        down,
        ids,
        weights,
        torch.tensor(INTERMEDIATE_GLOBAL_SCALE, device=draw.device),
        shape.expert_offset,
        shape.all_experts,
    )
    exact = moe_value(problem, lossless=True)
    expected = exact.to(torch.bfloat16)
    if not torch.equal(expected.double(), exact):
        raise ProbeError(f"exact MoE probe: the result of {shape.label} is not exact in bf16")
    return ExactMoe(problem, expected)


def _activations(draw: Draw, shape: MoeShape, flips, exponents, order) -> Fp4Operand:
    tokens, pairs = shape.tokens, exponents.numel()
    first = draw.choice((1, 2, 3), (tokens, pairs, BLOCK))
    first = first.scatter(-1, draw.integers(0, BLOCK, (tokens, pairs, 1)), SIX) + draw.sign_bits((tokens, pairs, BLOCK))
    pattern = draw.orders((tokens,))[:, None, None] % (2 * PATTERNS)
    signal = torch.zeros((tokens, 1, BLOCK), dtype=torch.int64, device=draw.device)
    signal = signal.scatter(-1, pattern, SIX).scatter(-1, (pattern + PATTERNS) % BLOCK, TWO)
    row = draw.powers(0, 2, (tokens, 1))
    pair_scale = 4.0 * draw.powers(0, 2, (tokens, pairs))
    spare = _spare(draw, order, 2 * pairs, (tokens,), same=True)
    codes = torch.cat([first, first ^ flips, signal, spare], 1)[:, order]
    scale = torch.cat(
        [pair_scale, pair_scale * torch.exp2(exponents.double()), torch.ones_like(row).expand(-1, 1 + spare.shape[1])], 1
    )
    return _operand(codes, (scale * row)[:, order], ACTIVATION_GLOBAL_SCALE, draw)


def _expert(
    draw: Draw, shape: MoeShape, flips, exponents, order, row, index: int, ratio: float, dense: bool
) -> tuple[Fp4Operand, ...]:
    """(gate [I, H], up [I, H], down [H, I]) of one expert; global scales differ by expert, block scales make up for it."""
    lift = 2.0 ** (index % 3)
    answers = _Answers.draw(draw, shape.intermediate // BLOCK)
    common = (draw, flips, exponents, order, dense)
    gate = _first_gemm(*common, answers.gate_codes, GATE_SCALE * lift, WEIGHT_GLOBAL_SCALE / lift, lift)
    up = _first_gemm(*common, answers.up_codes, lift / ratio, WEIGHT_GLOBAL_SCALE / lift * ratio, lift / ratio)
    return gate, up, _down(draw, row, answers, 2.0 ** -(index % 2), dense)


@dataclasses.dataclass(frozen=True)
class _Answers:
    """What the neurons of one expert say; neuron blocks are [pair firsts | pair seconds | one or two signal blocks] in `order`.

    up_codes: [I, 8], the code for each pattern; one 6 in each block of neurons. gate_codes: [I, 8]; 1 or 2 by block (32 or
    64), or -4 (-128) for the two neurons of a block that are off under that pattern.
    flips: [pairs, 16], 0 or 8, neurons whose partner has the opposite sign. doubled: [pairs], 1 where the first block's gate is 64.
    """

    pairs: int
    order: torch.Tensor
    up_codes: torch.Tensor
    gate_codes: torch.Tensor
    flips: torch.Tensor
    doubled: torch.Tensor

    @classmethod
    def draw(cls, draw: Draw, blocks: int) -> "_Answers":
        pairs = (blocks - 1) // 2
        apart = blocks - 2 * pairs
        place = draw.orders((pairs + apart, PATTERNS, BLOCK)).movedim(1, 2)  # [blocks, 16, 8]
        magnitude = torch.cat([draw.choice(ALL_CODES, (pairs, BLOCK, PATTERNS)), draw.choice((1, 2), (apart, BLOCK, PATTERNS))])
        codes = magnitude.masked_fill(place == 0, SIX) + draw.sign_bits(tuple(magnitude.shape))
        flips, doubled = draw.sign_bits((pairs, BLOCK)), draw.integers(0, 2, (pairs,))
        on = torch.where(torch.cat([doubled, 1 - doubled, doubled.new_zeros(apart)]) == 1, TWO, ONE)
        off = (place == 1) | (place == 2)
        order = draw.permutation(blocks)
        off = torch.cat([off[:pairs], off[:pairs], off[pairs:]])
        up = torch.cat([codes[:pairs], codes[:pairs] ^ flips[..., None], codes[pairs:]])
        gate = torch.where(off, FOUR + 8, on[:, None, None])
        return cls(pairs, order, up[order].flatten(0, 1), gate[order].flatten(0, 1), flips, doubled)


def _first_gemm(
    draw: Draw, flips, exponents, order, dense: bool, answer_codes, answer_scale, global_scale, lift: float
) -> Fp4Operand:
    """One of gate and up, [I, H]: random pairs that cancel whatever the token is, and the answers [I, 8] in the signal block."""
    rows, pairs = answer_codes.shape[0], exponents.numel()
    first = draw.choice(ALL_CODES, (rows, pairs, BLOCK)) + draw.sign_bits((rows, pairs, BLOCK))
    pair_scale = 2.0 * lift * draw.choice(BINADE, (rows, pairs)).double()  # from 16 on: one wrong code moves up by half of it
    spare = _spare(draw, order, 2 * pairs, (rows,), same=False)
    signal = torch.cat([answer_codes, answer_codes], -1)[:, None]
    codes = torch.cat([first * dense, (first ^ flips ^ 8) * dense, signal, spare * dense], 1)[:, order]
    ones = pair_scale.new_ones((rows, 1))
    rest = torch.cat([ones * answer_scale, (ones * 16.0 * lift).expand(-1, spare.shape[1])], 1)
    scale = torch.cat([pair_scale, pair_scale * torch.exp2(-exponents.double()), rest], 1)
    return _operand(codes, scale[:, order], global_scale, draw)


def _spare(draw: Draw, order, used: int, lead: tuple[int, ...], same: bool) -> torch.Tensor:
    """The block that is left over when their number is even: its second half cancels its first."""
    count = order.numel() - used - 1
    half = draw.choice(ALL_CODES, (*lead, count, BLOCK // 2))
    half = half.scatter(-1, torch.zeros_like(half[..., :1]), SIX) + draw.sign_bits(tuple(half.shape))
    return torch.cat([half, half if same else half ^ 8], -1)


def _down(draw: Draw, row: torch.Tensor, answers: _Answers, global_scale: float, dense: bool) -> Fp4Operand:
    """[H, I]: dense pairs of neuron blocks that cancel, and three small weights in one signal block."""
    rows, pairs, apart = row.shape[0], answers.pairs, answers.order.numel() - 2 * answers.pairs
    first = draw.choice(ALL_CODES, (rows, pairs, BLOCK)) + draw.sign_bits((rows, pairs, BLOCK))
    second = first ^ answers.flips ^ 8
    chosen = draw.orders((rows, apart, BLOCK)) < 3
    chosen &= (torch.arange(rows, device=draw.device)[:, None] % apart == torch.arange(apart, device=draw.device))[..., None]
    signal = torch.where(chosen, 1 + draw.sign_bits((rows, apart, BLOCK)), 0)
    pair_scale = draw.choice(BINADE, (rows, pairs)).double() / 8
    partner = torch.exp2((2 * answers.doubled - 1).double())  # the partner's gate is twice or half as large
    scale = torch.cat([pair_scale, pair_scale * partner, torch.full((rows, apart), 0.125, device=draw.device).double()], 1)
    scale = scale * row
    codes = torch.cat([first * dense, second * dense, signal], 1)[:, answers.order]
    return _operand(codes, scale[:, answers.order] / global_scale, global_scale * 2.0**-10, draw)


def _operand(codes: torch.Tensor, block_scale: torch.Tensor, global_scale: float, draw: Draw) -> Fp4Operand:
    stored = block_scale.to(torch.float8_e4m3fn)
    if not torch.equal(stored.double(), block_scale):
        raise ProbeError("exact MoE probe: a block scale is not an E4M3 number")
    return Fp4Operand(codes.flatten(1).to(torch.uint8), stored, torch.tensor(global_scale, dtype=torch.float32, device=draw.device))


def _routing(draw: Draw, shape: MoeShape, skewed: bool, even: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts for each token, and weights 1, 1/2, 1/2, ... in random places: up to top-14 the sum fits bf16.

    even: 2^n weights of 2^-n and zeros instead.
    """
    ids = draw.orders((1 if skewed else shape.tokens, shape.all_experts))[:, : shape.topk].expand(shape.tokens, -1)
    sharing = 1 << (shape.topk.bit_length() - 1)
    weights = [float(j < sharing) / sharing if even else max(2.0**-j, 0.5) for j in range(shape.topk)]
    ladder = torch.tensor(weights, device=draw.device)
    return ids.to(torch.int32).contiguous(), ladder[draw.orders((shape.tokens, shape.topk))]


def answered_by(problem: MoeProblem, token: int, answer: torch.Tensor) -> int | None:
    """Global number of the local expert whose answer to `token` is `answer` [H]; None if none of them gives it.

    For problems of top-1: each expert of an exact probe answers with numbers of its own.
    """
    for expert in range(problem.expert_offset, problem.expert_offset + problem.experts):
        ids = torch.full_like(problem.topk_ids[token : token + 1], expert)
        asked = take_rows(problem, slice(token, token + 1))
        if torch.equal(moe_value(dataclasses.replace(asked, topk_ids=ids), lossless=True)[0].to(answer.dtype), answer):
            return expert
    return None
