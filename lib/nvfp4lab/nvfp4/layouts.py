"""Memory layouts of block scales and expert weights: what kernels want instead of plain rows, each with its inverse.

Block scales: `LINEAR`, `SWIZZLED_128X4`, `SWIZZLED_8X4`; the swizzled ones pad rows and columns with zeros.
Rows: `shuffle_rows` (TRT-LLM's matrix A), `shuffle_scales`. Gate and up projections: `swap_halves`, `interleave_halves`.
All move bytes and change none, return new tensors, and take contiguous ones of any dtype and leading dimensions: packed
codes and block scales, of one expert or many, go through the same functions.
"""

import dataclasses

import torch

from nvfp4lab.errors import LabError


@dataclasses.dataclass(frozen=True)
class ScaleLayout:
    """How a matrix of block scales [..., rows, columns] lies in memory (columns = K / 16).

    Tiles of tile_rows x tile_columns follow one another along K, then along the rows. Inside a tile, `row_groups` rows
    that are tile_rows / row_groups apart stand side by side.
    """

    name: str
    tile_rows: int
    tile_columns: int
    row_groups: int = 1

    def padded_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """(rows, columns) rounded up to whole tiles."""
        return -(-rows // self.tile_rows) * self.tile_rows, -(-columns // self.tile_columns) * self.tile_columns

    def from_linear(self, scale: torch.Tensor) -> torch.Tensor:
        """[..., rows, columns] -> [..., padded rows, padded columns] in this layout; padding is zero."""
        padded = pad(scale, *self.padded_shape(*_matrix_shape("scale", scale)))
        row_tiles, column_tiles = padded.shape[-2] // self.tile_rows, padded.shape[-1] // self.tile_columns
        group_rows = self.tile_rows // self.row_groups
        tiles = padded.reshape(*padded.shape[:-2], row_tiles, self.row_groups, group_rows, column_tiles, self.tile_columns)
        return tiles.transpose(-4, -2).reshape(padded.shape).contiguous()

    def to_linear(self, stored: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
        """Inverse of `from_linear` for a matrix that was rows x columns. Raises LabError for another stored shape."""
        needed = self.padded_shape(rows, columns)
        given = _matrix_shape("stored", stored)
        if given != needed:
            raise LabError(
                f"stored: {given[0]} x {given[1]} scales, needs {needed[0]} x {needed[1]} for {rows} x {columns} in {self.name}"
            )
        row_tiles, column_tiles = given[0] // self.tile_rows, given[1] // self.tile_columns
        group_rows = self.tile_rows // self.row_groups
        tiles = stored.reshape(*stored.shape[:-2], row_tiles, column_tiles, group_rows, self.row_groups, self.tile_columns)
        return crop(tiles.transpose(-4, -2).reshape(stored.shape), rows, columns)


LINEAR = ScaleLayout("linear", 1, 1)
# A tile is 32 lines of 16 bytes: rows i, i + 32, i + 64, i + 96 with four columns each. cuBLAS calls it the "1D block
# scaling factors layout"; FlashInfer's get_sf_out_offset_128x4 and SGLang's swizzle_blockscale write it.
SWIZZLED_128X4 = ScaleLayout("swizzled_128x4", 128, 4, row_groups=4)
SWIZZLED_8X4 = ScaleLayout("swizzled_8x4", 8, 4)  # FlashInfer's get_sf_out_offset_8x4: small M in TRT-LLM kernels
SCALE_LAYOUTS: dict[str, ScaleLayout] = {layout.name: layout for layout in (LINEAR, SWIZZLED_128X4, SWIZZLED_8X4)}


def pad(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[..., r, c] -> [..., rows, columns] with zeros below and to the right. Raises LabError where it would crop."""
    given_rows, given_columns = _matrix_shape("matrix", matrix)
    if rows < given_rows or columns < given_columns:
        raise LabError(f"matrix: {given_rows} x {given_columns} cannot be padded to {rows} x {columns}; needs no more than that")
    padded = torch.zeros((*matrix.shape[:-2], rows, columns), dtype=matrix.dtype, device=matrix.device)
    padded[..., :given_rows, :given_columns] = matrix
    return padded


def crop(matrix: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Inverse of `pad`: the upper left rows x columns. Raises LabError where the matrix is smaller."""
    given_rows, given_columns = _matrix_shape("matrix", matrix)
    if not (0 <= rows <= given_rows and 0 <= columns <= given_columns):
        raise LabError(
            f"matrix: {given_rows} x {given_columns} cannot be cropped to {rows} x {columns}; needs 0 up to its own size"
        )
    return matrix[..., :rows, :columns].clone(memory_format=torch.contiguous_format)


def shuffle_rows(matrix: torch.Tensor, epilogue_tile_m: int = 128) -> torch.Tensor:
    """TRT-LLM's shuffleMatrixA on [..., rows, columns]: rows dealt out within blocks of 32 (16 unless tile_m % 128 == 0).

    Row 4 i + j of a block of 32 goes to 8 j + i (2 i + j to 8 j + i in a block of 16), as FlashInfer's
    `shuffle_matrix_a` does. Raises LabError unless rows are a multiple of the block.
    """
    hands = _hands(matrix, epilogue_tile_m)
    return matrix.unflatten(-2, (-1, 8, hands)).transpose(-3, -2).reshape(matrix.shape).contiguous()


def unshuffle_rows(matrix: torch.Tensor, epilogue_tile_m: int = 128) -> torch.Tensor:
    """Inverse of `shuffle_rows`."""
    hands = _hands(matrix, epilogue_tile_m)
    return matrix.unflatten(-2, (-1, hands, 8)).transpose(-3, -2).reshape(matrix.shape).contiguous()


def shuffle_scales(scale: torch.Tensor, epilogue_tile_m: int = 128) -> torch.Tensor:
    """Linear block scales of a weight [..., rows, columns] as `shuffle_matrix_sf_a` gives them: rows shuffled, then swizzled 128x4.

    Raises LabError unless rows are a multiple of 128: the kernel reads whole tiles.
    """
    rows, _ = _matrix_shape("scale", scale)
    if rows % SWIZZLED_128X4.tile_rows:
        raise LabError(f"scale: {rows} rows, needs a multiple of {SWIZZLED_128X4.tile_rows}")
    return SWIZZLED_128X4.from_linear(shuffle_rows(scale, epilogue_tile_m))


def unshuffle_scales(stored: torch.Tensor, columns: int, epilogue_tile_m: int = 128) -> torch.Tensor:
    """Inverse of `shuffle_scales` for `columns` scales a row."""
    rows, _ = _matrix_shape("stored", stored)
    return unshuffle_rows(SWIZZLED_128X4.to_linear(stored, rows, columns), epilogue_tile_m)


def swap_halves(w13: torch.Tensor) -> torch.Tensor:
    """Fused gate and up [..., 2 N, columns], gate rows first <-> up rows first. Its own inverse.

    Checkpoints have gate (w1) first, FlashInfer's CUTLASS and TRT-LLM MoE kernels want up (w3) first.
    """
    half = _half_rows(w13)
    return torch.cat((w13[..., half:, :], w13[..., :half, :]), dim=-2)


def interleave_halves(w13: torch.Tensor, group: int = 1) -> torch.Tensor:
    """[..., 2 N, columns], two halves -> `group` rows of the first, `group` rows of the second, and so on.

    group 1: TRT-LLM's reorderRowsForGatedActGemm; group 64: CuTe DSL's SwiGLU. Raises LabError unless group divides N.
    """
    half = _half_rows(w13, group)
    return w13.unflatten(-2, (2, half // group, group)).transpose(-4, -3).reshape(w13.shape).contiguous()


def deinterleave_halves(w13: torch.Tensor, group: int = 1) -> torch.Tensor:
    """Inverse of `interleave_halves`."""
    half = _half_rows(w13, group)
    return w13.unflatten(-2, (half // group, 2, group)).transpose(-4, -3).reshape(w13.shape).contiguous()


def _matrix_shape(name: str, matrix: torch.Tensor) -> tuple[int, int]:
    if not isinstance(matrix, torch.Tensor) or matrix.ndim < 2:
        given = tuple(matrix.shape) if isinstance(matrix, torch.Tensor) else type(matrix).__name__
        raise LabError(f"{name}: {given}, needs a torch.Tensor of at least two dimensions")
    if not matrix.is_contiguous():
        strides = f"strides {matrix.stride()} for shape {tuple(matrix.shape)}"
        raise LabError(f"{name}: {strides}, needs contiguous; call .contiguous() where a copy is meant")
    return matrix.shape[-2], matrix.shape[-1]


def _hands(matrix: torch.Tensor, epilogue_tile_m: int) -> int:
    """How many hands the rows of a block are dealt to, 8 rows each."""
    if epilogue_tile_m < 1:
        raise LabError(f"epilogue_tile_m: {epilogue_tile_m}, needs a positive number of rows, such as 128")
    hands = 4 if epilogue_tile_m % 128 == 0 else 2
    rows, _ = _matrix_shape("matrix", matrix)
    if rows % (8 * hands):
        raise LabError(f"matrix: {rows} rows, needs a multiple of {8 * hands} for epilogue_tile_m {epilogue_tile_m}")
    return hands


def _half_rows(w13: torch.Tensor, group: int = 1) -> int:
    rows, _ = _matrix_shape("w13", w13)
    if group < 1 or rows % (2 * group):
        raise LabError(f"w13: {rows} rows, needs two halves of a multiple of {group} rows")
    return rows // 2
