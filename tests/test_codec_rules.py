"""The codec's own rules, each against a plain restatement: rounding, packing, scales, NaN, empty, memory, bad input."""

import dataclasses
import re
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.conventions import (
    CONVENTIONS,
    E2M1_MIDPOINTS,
    E2M1_VALUES,
    FLASHINFER,
    MODELOPT,
    TORCHAO,
    TieRule,
    ZeroSign,
)

EVERY_CONVENTION = pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=CONVENTIONS.keys())


def nearest_code(value: float, ties: TieRule) -> int:
    """The definition: the E2M1 magnitude nearest to |value| in exact arithmetic, ties by `ties`, saturating."""
    distances = [abs(Fraction(abs(value)) - Fraction(v)) for v in E2M1_VALUES]
    nearest = [code for code, distance in enumerate(distances) if distance == min(distances)]
    if len(nearest) == 1:
        return nearest[0]
    return {TieRule.TO_EVEN: next(c for c in nearest if c % 2 == 0), TieRule.TO_ZERO: nearest[0], TieRule.AWAY: nearest[1]}[ties]


@pytest.mark.parametrize("ties", TieRule)
@settings(max_examples=200, deadline=None)
@given(value=st.one_of(st.floats(-8, 8, width=32), st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_rounding_is_to_the_nearest(ties, value):
    convention = dataclasses.replace(MODELOPT, ties=ties, zero_sign=ZeroSign.OF_BIT)
    code = codec.round_to_codes(torch.tensor([value], dtype=torch.float32), convention).item()
    assert code & 7 == nearest_code(value, ties)
    assert code >> 3 == torch.signbit(torch.tensor(value)).item()


@pytest.mark.parametrize("ties", TieRule)
def test_rounding_at_every_midpoint_and_its_neighbours(ties):
    exact = torch.tensor(E2M1_MIDPOINTS)
    for values in (exact, exact.nextafter(torch.zeros(7)), exact.nextafter(torch.full((7,), 9.0))):
        codes = codec.round_to_codes(values, dataclasses.replace(MODELOPT, ties=ties))
        assert codes.tolist() == [nearest_code(value, ties) for value in values.tolist()]


def test_sign_of_zero_by_rule():
    values = torch.tensor([-0.0, -1e-30, -(2.0**-149), 0.0])
    by_value = dataclasses.replace(MODELOPT, zero_sign=ZeroSign.OF_VALUE)
    by_bit = dataclasses.replace(MODELOPT, zero_sign=ZeroSign.OF_BIT)
    assert codec.round_to_codes(values, by_value).tolist() == [0, 8, 8, 0]
    assert codec.round_to_codes(values, by_bit).tolist() == [8, 8, 8, 0]


def test_specials_saturate_and_nan_has_its_code():
    values = torch.tensor([float("inf"), float("-inf"), 1e38, float("nan"), -float("nan")])
    assert codec.round_to_codes(values, MODELOPT).tolist() == [7, 15, 7, 7, 7]


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(0, 4), pairs=st.integers(0, 9), seed=st.integers(0, 99))
def test_pack_and_unpack_are_inverse(rows, pairs, seed):
    codes = torch.randint(0, 16, (rows, 2 * pairs), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = codec.pack(codes)
    assert torch.equal(codec.unpack(packed), codes)
    assert packed.shape == (rows, pairs)
    if packed.numel():
        assert packed[0, 0] == codes[0, 0] | codes[0, 1] << 4  # low nibble: the even column


@EVERY_CONVENTION
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_values_on_the_grid_survive(convention, dtype):
    """Codes dense, one 6 in each block, scales powers of two: quantising what was dequantised changes nothing."""
    generator = torch.Generator().manual_seed(5)
    codes = (
        torch.randint(1, 8, (16, 64), dtype=torch.uint8, generator=generator)
        + 8 * torch.randint(0, 2, (16, 64), generator=generator).byte()
    )
    codes[:, ::16] = 7
    scale = torch.exp2(torch.randint(-2, 3, (16, 4), generator=generator).float()).to(torch.float8_e4m3fn)
    tensor = codec.NVFP4Tensor(codec.pack(codes), scale, torch.tensor(0.25))
    again = codec.quantize(codec.dequantize(tensor, dtype), global_scale=0.25, convention=convention)
    assert torch.equal(again.codes, tensor.codes)
    assert torch.equal(again.block_scale.float(), scale.float())


def test_dequantise_is_the_plain_formula_for_every_byte():
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).view(256, 8)
    for g in (1.0, 3.1e-4, 7e20):
        for scale_byte in (0, 1, 7, 8, 0x38, 0x7E, 0x7F, 0xB8):
            scale = torch.full((256, 1), scale_byte, dtype=torch.uint8).view(torch.float8_e4m3fn)
            tensor = codec.NVFP4Tensor(codes, scale, torch.tensor(g))
            plain = codec.e2m1_values()[codec.unpack(codes).long()] * (scale.float() * torch.tensor(g))
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                assert torch.equal(codec.dequantize(tensor, dtype).nan_to_num(nan=5.5), plain.to(dtype).nan_to_num(nan=5.5))


def test_chunks_do_not_change_the_result(monkeypatch):
    x = torch.randn(50, 48, generator=torch.Generator().manual_seed(0))
    whole = codec.quantize(x)
    monkeypatch.setattr(codec, "_CPU_CHUNK_BLOCKS", 7)
    pieces = codec.quantize(x)
    assert torch.equal(whole.codes, pieces.codes)
    assert torch.equal(whole.block_scale.float(), pieces.block_scale.float())
    assert torch.equal(codec.dequantize(whole), codec.dequantize(pieces))


def test_parameters_are_quantised_without_a_graph():
    weight = torch.nn.Parameter(torch.randn(300, 256))
    tensor = codec.quantize(weight)
    assert not tensor.global_scale.requires_grad
    assert not codec.dequantize(tensor).requires_grad
    assert torch.equal(tensor.codes, codec.quantize(weight.detach()).codes)


def test_one_global_scale_per_expert_equals_one_tensor_each():
    x = torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    g = torch.tensor([0.001, 0.01, 0.002])
    together = codec.quantize(x, global_scale=g)
    value = codec.dequantize(together)
    for expert in range(3):
        alone = codec.quantize(x[expert], global_scale=g[expert])
        assert torch.equal(together.codes[expert], alone.codes)
        assert torch.equal(value[expert], codec.dequantize(alone))


@EVERY_CONVENTION
def test_all_zero_tensor(convention):
    tensor = codec.quantize(torch.zeros(2, 32), convention=convention)
    assert tensor.global_scale == 1.0
    assert torch.equal(codec.dequantize(tensor, torch.float32), torch.zeros(2, 32))


def test_nan_stays_in_its_block():
    x = torch.ones(1, 48)
    x[0, 20] = float("nan")
    value = codec.dequantize(codec.quantize(x, global_scale=1 / 448), torch.float32)
    assert value[0, 16:32].isnan().all() and not value[0, :16].isnan().any() and not value[0, 32:].isnan().any()


def test_flashinfer_zeroes_a_zero_block_and_saturates_an_underflowed_one():
    x = torch.zeros(1, 32)
    x[0, 16:] = 1e-20
    tensor = codec.quantize(x, encode_scale=1.0, convention=FLASHINFER)
    assert codec.unpack(tensor.codes)[0].tolist() == [0] * 16 + [7] * 16
    assert tensor.block_scale.float().tolist() == [[0.0, 0.0]]


def test_flashinfer_takes_amax_past_a_nan():
    """`__hmax2` returns the operand that is a number, so the block keeps its scale and the NaN becomes 6."""
    x = torch.full((1, 16), 3.0)
    x[0, 4] = float("nan")
    tensor = codec.quantize(x, encode_scale=1.0, convention=FLASHINFER)
    assert tensor.block_scale.item() == 0.5
    assert codec.unpack(tensor.codes)[0].tolist() == [7] * 16


def test_flashinfer_flushes_subnormals_and_others_do_not():
    x = torch.full((1, 16), 2.0**-130)
    assert codec.quantize(x, global_scale=2.0**-124, convention=FLASHINFER).block_scale.item() == 0.0
    assert codec.unpack(codec.quantize(x, global_scale=2.0**-124, convention=FLASHINFER).codes).count_nonzero() == 0
    assert codec.unpack(codec.quantize(x, global_scale=2.0**-124, convention=MODELOPT).codes).count_nonzero() == 16


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0,), (3, 0, 16)])
def test_no_elements(shape):
    x = torch.empty(shape, dtype=torch.bfloat16)
    tensor = codec.quantize(x, global_scale=1.0)
    assert tensor.shape == shape
    assert codec.dequantize(tensor).shape == shape
    with pytest.raises(LabError, match="no elements"):
        codec.quantize(x)


GOOD = torch.ones(4, 32)
SCALE = torch.ones(4, 2).to(torch.float8_e4m3fn)
CODES = torch.zeros(4, 16, dtype=torch.uint8)
G = torch.tensor(1.0)
BAD = {
    "float64": (lambda: codec.quantize(GOOD.double()), "float64, needs torch.bfloat16"),
    "int": (lambda: codec.quantize(GOOD.int()), "int32, needs"),
    "list": (lambda: codec.quantize([1.0] * 16), "list, needs a torch.Tensor"),
    "K": (lambda: codec.quantize(torch.ones(4, 24)), "(4, 24), needs a last dimension that is a multiple of 16"),
    "0-dim": (lambda: codec.quantize(torch.tensor(1.0)), "shape ()"),
    "transposed": (lambda: codec.quantize(torch.ones(32, 16).T.contiguous().T), "needs contiguous"),
    "NaN amax": (lambda: codec.quantize(torch.full((1, 16), float("nan"))), "largest magnitude is nan"),
    "Inf amax": (lambda: codec.global_scale_of(torch.full((1, 16), float("inf"))), "largest magnitude is inf"),
    "both scales": (lambda: codec.quantize(GOOD, global_scale=1.0, encode_scale=1.0), "give one"),
    "zero scale": (lambda: codec.quantize(GOOD, global_scale=0.0), "0.0, needs positive finite"),
    "negative scale": (lambda: codec.quantize(GOOD, encode_scale=-1.0), "encode_scale: -1.0, needs positive finite"),
    "NaN scale": (lambda: codec.quantize(GOOD, global_scale=torch.tensor(float("nan"))), "needs positive finite"),
    "bf16 scale": (lambda: codec.quantize(GOOD, global_scale=G.bfloat16()), "bfloat16, needs torch.float32"),
    "scales of 3": (lambda: codec.quantize(GOOD, global_scale=torch.ones(3)), "shape (3,), needs () or (4,)"),
    "scale [1] of a row": (lambda: codec.quantize(GOOD[0].clone(), global_scale=torch.ones(1)), "shape (1,), needs ()"),
    "scale elsewhere": (lambda: codec.quantize(GOOD, global_scale=torch.tensor(1.0, device="meta")), "on meta, needs cpu"),
    "scale text": (lambda: codec.quantize(GOOD, global_scale="1"), "global_scale: str, needs a number"),
    "convention by name": (lambda: codec.quantize(GOOD, convention="torchao"), "'torchao', needs a Convention; CONVENTIONS has"),
    "decoded by name": (lambda: codec.dequantize(codec.quantize(GOOD), convention="torchao"), "'torchao', needs a Convention"),
    "scaled by name": (lambda: codec.global_scale_of(GOOD, "torchao"), "'torchao', needs a Convention"),
    "out dtype": (lambda: codec.dequantize(codec.quantize(GOOD), torch.float64), "float64, needs"),
    "codes dtype": (lambda: codec.NVFP4Tensor(CODES.int(), SCALE, G), "codes: dtype torch.int32, needs torch.uint8"),
    "scale dtype": (
        lambda: codec.NVFP4Tensor(CODES, SCALE.view(torch.uint8), G),
        "block_scale: dtype torch.uint8, needs",
    ),
    "scale padded": (lambda: codec.NVFP4Tensor(CODES, torch.zeros(128, 4).to(torch.float8_e4m3fn), G), "(128, 4), needs (4, 2)"),
    "scale flat": (lambda: codec.NVFP4Tensor(CODES, SCALE.view(-1), G), "(8,), needs (4, 2)"),
    "codes off block": (lambda: codec.NVFP4Tensor(CODES[:, :12].contiguous(), SCALE, G), "multiple of 8"),
    "codes strided": (lambda: codec.NVFP4Tensor(CODES[:, ::2], SCALE[:, :1], G), "codes: strides"),
    "odd pack": (lambda: codec.pack(CODES[:, :3].contiguous()), "multiple of 2"),
    "nan code": (lambda: dataclasses.replace(TORCHAO, nan_code=16), "nan_code 16"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_was_given_and_needed(name):
    call, words = BAD[name]
    with pytest.raises(LabError, match=re.escape(words)):
        call()
