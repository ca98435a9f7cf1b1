"""Layouts: every one has its inverse, and each equals what is published: CUDA offset formulas, row maps, SGLang, torchao."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4 import layouts
from nvfp4lab.nvfp4.layouts import LINEAR, SCALE_LAYOUTS, SWIZZLED_8X4, SWIZZLED_128X4

LEAD = st.lists(st.integers(1, 3), max_size=2)
quick = settings(max_examples=60, deadline=None)


def numbered(*shape: int) -> torch.Tensor:
    """Every element its own number: a test on it sees any two that changed places."""
    return torch.arange(1, torch.Size(shape).numel() + 1, dtype=torch.int32).view(shape)


def offset_128x4(m: int, k: int, columns: int) -> int:
    """flashinfer 0.6.15.post1, quantization_utils.cuh:991 get_sf_out_offset_128x4."""
    tiles_k = (columns + 3) // 4
    return (m // 128) * tiles_k * 512 + (k // 4) * 512 + (m % 32) * 16 + (m % 128) // 32 * 4 + k % 4


def offset_8x4(m: int, k: int, columns: int) -> int:
    """flashinfer 0.6.15.post1, quantization_utils.cuh:1022 get_sf_out_offset_8x4."""
    tiles_k = (columns + 3) // 4
    return (m // 8) * tiles_k * 32 + (k // 4) * 32 + (m % 8) * 4 + k % 4


# flashinfer 0.6.15.post1, utils.py:874: where row i of a block goes.
ROW_MAP_16 = [0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15]
ROW_MAP_32 = [group * 8 + i for i in range(8) for group in range(4)]


@pytest.mark.parametrize("layout", SCALE_LAYOUTS.values(), ids=SCALE_LAYOUTS.keys())
@quick
@given(lead=LEAD, rows=st.integers(1, 300), columns=st.integers(1, 19))
def test_scale_layouts_have_an_inverse_and_pad_with_zeros(layout, lead, rows, columns):
    scale = numbered(*lead, rows, columns)
    stored = layout.from_linear(scale)
    assert stored.is_contiguous()
    assert stored.shape == (*lead, *layout.padded_shape(rows, columns))
    assert torch.equal(layout.to_linear(stored, rows, columns), scale)
    assert stored.count_nonzero() == scale.numel()
    assert torch.equal(stored.flatten().sort().values[-scale.numel() :], scale.flatten())


@pytest.mark.parametrize(("layout", "offset"), [(SWIZZLED_128X4, offset_128x4), (SWIZZLED_8X4, offset_8x4)], ids=["128x4", "8x4"])
@quick
@given(rows=st.integers(1, 260), columns=st.integers(1, 11))
def test_swizzles_equal_the_cuda_offsets(layout, offset, rows, columns):
    scale = numbered(rows, columns)
    flat = layout.from_linear(scale).flatten()
    index = torch.tensor([[offset(m, k, columns) for k in range(columns)] for m in range(rows)])
    assert torch.equal(flat[index], scale)


def test_linear_is_the_matrix_itself_but_a_copy():
    scale = numbered(3, 5)
    stored = LINEAR.from_linear(scale)
    assert torch.equal(stored, scale)
    stored[0, 0] = -1
    assert scale[0, 0] == 1


@pytest.mark.parametrize(("tile", "row_map"), [(128, ROW_MAP_32), (256, ROW_MAP_32), (64, ROW_MAP_16)])
def test_shuffle_equals_the_published_row_map(tile, row_map):
    matrix = numbered(96, 3)
    expected = torch.empty_like(matrix)
    for row in range(96):
        block = row // len(row_map) * len(row_map)
        expected[block + row_map[row % len(row_map)]] = matrix[row]
    assert torch.equal(layouts.shuffle_rows(matrix, tile), expected)


@quick
@given(lead=LEAD, blocks=st.integers(1, 5), columns=st.integers(1, 9), tile=st.sampled_from([64, 128]))
def test_shuffle_has_an_inverse(lead, blocks, columns, tile):
    matrix = numbered(*lead, 32 * blocks, columns)
    assert torch.equal(layouts.unshuffle_rows(layouts.shuffle_rows(matrix, tile), tile), matrix)
    assert torch.equal(layouts.shuffle_rows(layouts.unshuffle_rows(matrix, tile), tile), matrix)


@quick
@given(lead=LEAD, tiles=st.integers(1, 2), columns=st.integers(1, 9))
def test_shuffled_scales_have_an_inverse(lead, tiles, columns):
    scale = numbered(*lead, 128 * tiles, columns)
    stored = layouts.shuffle_scales(scale)
    assert torch.equal(stored, SWIZZLED_128X4.from_linear(layouts.shuffle_rows(scale)))
    assert torch.equal(layouts.unshuffle_scales(stored, columns), scale)


@quick
@given(lead=LEAD, groups=st.integers(1, 6), group=st.sampled_from([1, 2, 16, 64]), columns=st.integers(1, 5))
def test_gate_up_orders_have_an_inverse(lead, groups, group, columns):
    w13 = numbered(*lead, 2 * groups * group, columns)
    assert torch.equal(layouts.swap_halves(layouts.swap_halves(w13)), w13)
    mixed = layouts.interleave_halves(w13, group)
    assert torch.equal(layouts.deinterleave_halves(mixed, group), w13)
    half = groups * group
    assert torch.equal(mixed[..., :group, :], w13[..., :group, :])
    assert torch.equal(mixed[..., group : 2 * group, :], w13[..., half : half + group, :])
    assert torch.equal(layouts.swap_halves(w13)[..., :half, :], w13[..., half:, :])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
def test_every_dtype_that_is_stored_passes(dtype):
    matrix = (numbered(256, 4) % 200).to(torch.uint8)
    matrix = matrix.view(dtype) if dtype is torch.float8_e4m3fn else matrix.to(dtype)
    round_trips = (
        SWIZZLED_128X4.to_linear(SWIZZLED_128X4.from_linear(matrix), 256, 4),
        layouts.unshuffle_scales(layouts.shuffle_scales(matrix), 4),
        layouts.swap_halves(layouts.swap_halves(matrix)),
        layouts.deinterleave_halves(layouts.interleave_halves(matrix)),
    )
    assert all(back.dtype == dtype and torch.equal(back.view(torch.uint8), matrix.view(torch.uint8)) for back in round_trips)


@pytest.mark.filterwarnings("ignore")
def test_equal_to_sglang():
    published = pytest.importorskip("sglang.srt.layers.quantization.utils")
    for shape in ((128, 4), (130, 5), (3, 200, 9)):
        scale = (numbered(*shape) % 100).float().to(torch.float8_e4m3fn)
        ours, theirs = SWIZZLED_128X4.from_linear(scale), published.swizzle_blockscale(scale)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    w13 = numbered(2, 12, 3)
    assert torch.equal(layouts.swap_halves(w13), published.swap_w13_to_w31(w13))
    assert torch.equal(layouts.swap_halves(w13), published.reorder_w1w3_to_w3w1(w13, w13)[0])


@pytest.mark.filterwarnings("ignore")
def test_equal_to_torchao():
    published = pytest.importorskip("torchao.prototype.mx_formats.utils")
    for shape in ((128, 4), (130, 5), (300, 9)):
        scale = numbered(*shape)
        stored = SWIZZLED_128X4.from_linear(scale)
        assert torch.equal(stored.flatten(), published.to_blocked(scale).flatten())
        assert torch.equal(published.from_blocked(stored.flatten(), *shape), scale)


def test_equal_to_flashinfer_where_it_is_installed():
    published = pytest.importorskip("flashinfer.utils")
    matrix = numbered(256, 4)
    for tile in (64, 128):
        assert torch.equal(matrix[published.get_shuffle_matrix_a_row_indices(matrix, tile)], layouts.shuffle_rows(matrix, tile))


SCALE = torch.zeros(128, 4)
BAD = {
    "one dimension": (lambda: LINEAR.from_linear(torch.zeros(4)), r"scale: \(4,\), needs .* two dimensions"),
    "no tensor": (lambda: layouts.swap_halves([[1], [2]]), "w13: list, needs a torch.Tensor"),
    "wrong length": (
        lambda: SWIZZLED_128X4.to_linear(SCALE, 129, 4),
        "128 x 4 scales, needs 256 x 4 for 129 x 4",
    ),
    "linear given": (lambda: SWIZZLED_8X4.to_linear(torch.zeros(5, 3), 5, 3), "5 x 3 scales, needs 8 x 4"),
    "pad smaller": (lambda: layouts.pad(SCALE, 64, 4), "128 x 4 cannot be padded to 64 x 4"),
    "crop larger": (lambda: layouts.crop(SCALE, 128, 5), "128 x 4 cannot be cropped to 128 x 5"),
    "crop to less than nothing": (lambda: layouts.crop(SCALE, -1, 4), "128 x 4 cannot be cropped to -1 x 4"),
    "no tile": (lambda: layouts.shuffle_rows(SCALE, 0), "epilogue_tile_m: 0, needs a positive number"),
    "rows of a shuffle": (lambda: layouts.shuffle_rows(torch.zeros(48, 4)), "48 rows, needs a multiple of 32"),
    "rows of scales": (lambda: layouts.shuffle_scales(torch.zeros(96, 4)), "96 rows, needs a multiple of 128"),
    "transposed": (lambda: layouts.shuffle_rows(torch.zeros(4, 32).T), r"strides \(1, 32\) for shape \(32, 4\), needs contiguous"),
    "odd halves": (lambda: layouts.swap_halves(torch.zeros(3, 4)), "3 rows, needs two halves"),
    "group": (lambda: layouts.interleave_halves(torch.zeros(32, 4), 64), "32 rows, needs two halves of a multiple of 64 rows"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_says_what_was_given_and_needed(name):
    call, words = BAD[name]
    with pytest.raises(LabError, match=words):
        call()
