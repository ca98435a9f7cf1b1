"""NVFP4 quantise and dequantise, bit for bit as a named convention does it.

    t = quantize(x)                       # NVFP4Tensor: codes, block_scale, global_scale
    y = dequantize(t, torch.bfloat16)

Plain torch, the same code on CPU and GPU. Two look-up tables carry it: 65,536 bytes from the upper half of a scaled
fp32 value to its E2M1 code, and 65,536 pairs from (block scale, byte of two codes) to the two values. Work goes in
chunks that stay in cache, so the memory beyond input and output is some tens of MiB. Nothing here is differentiable.
"""

import functools
from collections.abc import Callable, Iterator

import torch

from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4.conventions import (
    BLOCK_SIZE,
    E2M1_MAX,
    E2M1_MIDPOINTS,
    E4M3_MAX,
    MODELOPT,
    BlockScaleRule,
    Convention,
    ElementRule,
    GlobalScaleRule,
    TieRule,
    ZeroSign,
)
from nvfp4lab.nvfp4.tensor import (
    FLOAT_DTYPES,
    NVFP4Tensor,
    e2m1_values,
    pack,
    require_convention,
    require_device,
    require_dtype,
    require_global_scale,
    require_layout,
    unpack,
)

__all__ = ["NVFP4Tensor", "dequantize", "e2m1_values", "global_scale_of", "pack", "quantize", "round_to_codes", "unpack"]

# 2^20 elements: large enough for torch's own threads, small enough for the cache. Measured on 2 cores with bf16 4096 x 4096:
# 603 Melem/s, against 262 in chunks of 2^15 and 170 without chunks.
_CPU_CHUNK_BLOCKS = (1 << 20) // BLOCK_SIZE
_GPU_CHUNK_BLOCKS = 1 << 22
_FP32_MIN_NORMAL = torch.finfo(torch.float32).tiny


def global_scale_of(x: torch.Tensor, convention: Convention = MODELOPT) -> torch.Tensor:
    """The 0-dim float32 global scale that lets the largest block scale be 448; `convention.global_scale` says how.

    1.0 for an all-zero x, as compressed-tensors has it (ModelOpt's 0.0 would make every block scale NaN).
    Raises LabError for an empty x, and where amax is NaN or Inf: one such value would void the whole tensor.
    """
    return _default_scales(x, convention)[0]


def quantize(
    x: torch.Tensor,
    *,
    global_scale: torch.Tensor | float | None = None,
    encode_scale: torch.Tensor | float | None = None,
    convention: Convention = MODELOPT,
) -> NVFP4Tensor:
    """Quantise x [..., K] (bf16, fp16 or fp32; contiguous; K a multiple of 16) under `convention`.

    global_scale: what dequantisation multiplies by, 0-dim or [E] (one per slice of x's first dimension); by default
    `global_scale_of(x, convention)`. encode_scale: its reciprocal instead, as FlashInfer and compressed-tensors store
    it. Give the one that the codec compared with is given: fp32 reciprocals do not round-trip.
    NaN and Inf in x go where the convention sends them. x without elements gives parts without elements, and needs
    a given scale. Raises LabError for any other input; nothing is cast or copied to fit.
    """
    require_dtype("x", x, FLOAT_DTYPES)
    require_layout("x", x, BLOCK_SIZE)
    require_convention(convention)
    g, e = _both_scales(x, global_scale, encode_scale, convention)
    codes = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8, device=x.device)
    block_scale = torch.empty((*x.shape[:-1], x.shape[-1] // BLOCK_SIZE), dtype=torch.float8_e4m3fn, device=x.device)
    for index, part in _slices(g):
        _quantize_slice(x[part], g.view(-1)[index], e.view(-1)[index], convention, codes[part], block_scale[part])
    return NVFP4Tensor(codes, block_scale, g)


def dequantize(t: NVFP4Tensor, dtype: torch.dtype = torch.bfloat16, *, convention: Convention = MODELOPT) -> torch.Tensor:
    """Values [..., K] in `dtype` (bf16, fp16 or fp32): E2M1(code) * (block_scale * global_scale).

    Both products in fp32, then one rounding to `dtype`, as ModelOpt and torchao do (compressed-tensors divides the
    block scale by E instead: up to one fp32 ulp away). The convention decides the sign of code 8 alone.
    Raises LabError for other dtypes.
    """
    if dtype not in FLOAT_DTYPES:
        raise LabError(f"dtype: {dtype}, needs {' or '.join(map(str, FLOAT_DTYPES))}")
    require_convention(convention)
    out = torch.empty(t.shape, dtype=dtype, device=t.codes.device)
    for index, part in _slices(t.global_scale):
        _dequantize_slice(t.codes[part], t.block_scale[part], t.global_scale.view(-1)[index], convention, out[part])
    return out


def round_to_codes(scaled: torch.Tensor, convention: Convention = MODELOPT) -> torch.Tensor:
    """float32 values in units of one E2M1 step table -> uint8 codes 0..15 of the same shape; saturates at +-6.

    The table is indexed by the upper 16 bits, of which the lowest is set when any dropped bit was ("round to odd").
    Every midpoint between neighbours has at most 3 significant bits, so no comparison with one changes.
    """
    require_dtype("scaled", scaled, (torch.float32,))
    bits = scaled.view(torch.int32)
    upper = (bits & 0xFFFF).add_(0xFFFF).bitwise_or_(bits).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    table = _code_table(convention.ties, convention.zero_sign, convention.nan_code, scaled.device)
    return table.index_select(0, upper.view(-1)).view(scaled.shape)


@functools.lru_cache(maxsize=16)
def _code_table(ties: TieRule, zero_sign: ZeroSign, nan_code: int, device: torch.device) -> torch.Tensor:
    """uint8 [65536]: the E2M1 code of every bf16 bit pattern."""
    magnitude = (torch.arange(1 << 15, dtype=torch.int32) << 16).view(torch.float32)
    code = torch.zeros(1 << 15, dtype=torch.uint8)
    for lower_code, midpoint in enumerate(E2M1_MIDPOINTS):
        up_at_tie = ties is TieRule.AWAY or (ties is TieRule.TO_EVEN and lower_code % 2 == 1)
        code += (magnitude >= midpoint) if up_at_tie else (magnitude > midpoint)
    table = torch.cat((code, code | 8))
    table[magnitude.isnan().repeat(2)] = nan_code
    if zero_sign is ZeroSign.OF_VALUE:
        table[1 << 15] = 0  # -0.0 alone: a small negative value has its lowest bit set by then
    return table.to(device)


def _value_pairs(g: torch.Tensor, dtype: torch.dtype, convention: Convention) -> torch.Tensor:
    """`dtype` [65536 * 2]: both values of every byte of codes under every E4M3 byte, row = scale byte * 256 + code byte."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=g.device)
    scale = every_byte.view(torch.float8_e4m3fn).float() * g
    values = e2m1_values(g.device)
    if not convention.decodes_negative_zero:
        values[8] = 0.0
    pair = values[unpack(every_byte.view(-1, 1)).long()]  # [256, 2]
    return (scale.view(-1, 1, 1) * pair).to(dtype).view(-1)


def _quantize_slice(x, g, e, convention: Convention, codes: torch.Tensor, block_scale: torch.Tensor) -> None:
    """Fill `codes` and `block_scale` from x, all of one global scale."""
    blocks, code_bytes, scales = x.view(-1, BLOCK_SIZE), codes.view(-1, BLOCK_SIZE // 2), block_scale.view(-1)

    def work(chunk: slice) -> None:
        code_bytes[chunk], scales[chunk] = _quantize_blocks(blocks[chunk], g, e, convention)

    _for_chunks(work, blocks)


def _dequantize_slice(codes, block_scale, g, convention: Convention, out: torch.Tensor) -> None:
    """Fill `out` from codes and block scales, all of one global scale."""
    pair_dtype = torch.int64 if out.dtype is torch.float32 else torch.int32  # one gather fetches two neighbours
    table = _value_pairs(g, out.dtype, convention).view(pair_dtype)
    code_bytes, scale_bytes = codes.view(-1, BLOCK_SIZE // 2), block_scale.view(torch.uint8).view(-1, 1)
    pairs = out.view(-1, BLOCK_SIZE).view(pair_dtype)

    def work(chunk: slice) -> None:
        row = scale_bytes[chunk].to(torch.int32).bitwise_left_shift_(8)
        torch.index_select(table, 0, (row | code_bytes[chunk]).view(-1), out=pairs[chunk].view(-1))

    _for_chunks(work, code_bytes)


@torch.no_grad()
def _quantize_blocks(
    x: torch.Tensor, g: torch.Tensor, e: torch.Tensor, convention: Convention
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [B, 16] -> (packed codes uint8 [B, 8], block scales e4m3 [B])."""
    values = _flushed(x.float(), convention)
    amax = _block_amax(values, convention)
    stored = _block_scales(amax, x.dtype, g, e, convention)
    s = stored.float()
    match convention.element:
        case ElementRule.DIVIDE:
            scaled = values / (s * g).view(-1, 1)
        case ElementRule.DIVIDE_BY_S_OVER_E:
            scaled = values / (s / e).view(-1, 1)
        case ElementRule.TIMES_INV_G_OVER_S:
            scaled = values * ((1.0 / g) / s).view(-1, 1)
        case ElementRule.TIMES_RCP_S_RCP_E:
            factor = 1.0 / _flushed(s * _flushed(1.0 / e, convention), convention)
            factor = torch.where(amax == 0, 0.0, factor)  # the kernel asks for amax, so an underflowed s gives 1 / 0
            scaled = _flushed(values * factor.view(-1, 1), convention)
    words = round_to_codes(scaled, convention).view(torch.int16)  # little endian: the even column is the low byte
    return ((words >> 4) | (words & 0xF)).to(torch.uint8), stored


def _block_amax(x: torch.Tensor, convention: Convention) -> torch.Tensor:
    """Largest magnitude of each row of [B, 16]. Halving by columns runs several times faster than `amax(-1)` on a CPU."""
    larger = torch.fmax if convention.amax_skips_nan else torch.maximum
    x = x.abs()
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = larger(x[:, :half], x[:, half:])
    return x.view(-1)


def _block_scales(amax: torch.Tensor, dtype: torch.dtype, g: torch.Tensor, e: torch.Tensor, convention: Convention) -> torch.Tensor:
    """amax float32 [B] of values that came in `dtype` -> block scales e4m3 [B]."""
    match convention.block_scale:
        case BlockScaleRule.AMAX_OVER_6G:
            scale = amax / (E2M1_MAX * g)
        case BlockScaleRule.AMAX_OVER_6_OVER_G:
            scale = amax / E2M1_MAX / g
        case BlockScaleRule.E_TIMES_AMAX_OVER_6_IN_DTYPE:
            scale = e * (amax / E2M1_MAX).to(dtype).float()
        case BlockScaleRule.E_TIMES_AMAX_RCP_6:
            scale = _flushed(e * _flushed(amax * amax.new_tensor(E2M1_MAX).reciprocal(), convention), convention)
    scale = torch.where(scale == 0, convention.zero_block_scale, scale.clamp(min=convention.min_block_scale, max=E4M3_MAX))
    stored = scale.to(torch.float8_e4m3fn)
    if convention.underflow_block_scale:
        stored = torch.where(stored.float() == 0, convention.underflow_block_scale, stored.float()).to(torch.float8_e4m3fn)
    return stored


def _flushed(x: torch.Tensor, convention: Convention) -> torch.Tensor:
    """x with its subnormals made zeros of their sign, where the convention flushes."""
    return torch.where(x.abs() < _FP32_MIN_NORMAL, x * 0.0, x) if convention.flush_subnormals else x


@torch.no_grad()
def _default_scales(x: torch.Tensor, convention: Convention) -> tuple[torch.Tensor, torch.Tensor]:
    """(g, E) of x, both 0-dim float32."""
    require_dtype("x", x, FLOAT_DTYPES)
    require_convention(convention)
    if x.numel() == 0:
        raise LabError(f"x: shape {tuple(x.shape)} has no elements to take a global scale from; pass global_scale")
    amax = torch.stack(torch.aminmax(x)).abs().max()
    if not torch.isfinite(amax):
        raise LabError(f"x: its largest magnitude is {amax.item()}; clean the input, or pass the global_scale that is wanted")
    if amax == 0:
        amax = torch.full_like(amax, E2M1_MAX * E4M3_MAX)
    match convention.global_scale:
        case GlobalScaleRule.AMAX_OVER_2688:
            g = amax.float() / (E2M1_MAX * E4M3_MAX)
            return g, 1.0 / g
        case GlobalScaleRule.E_2688_OVER_AMAX:
            e = (E2M1_MAX * E4M3_MAX) / amax.float()
        case GlobalScaleRule.E_2688_OVER_AMAX_IN_DTYPE:
            e = ((E2M1_MAX * E4M3_MAX) / amax).float()
    return 1.0 / e, e


def _both_scales(x: torch.Tensor, global_scale, encode_scale, convention: Convention) -> tuple[torch.Tensor, torch.Tensor]:
    """(g, E) as given or by default; whichever was given is taken as it is."""
    if global_scale is not None and encode_scale is not None:
        raise LabError("global_scale and encode_scale were both given; they are reciprocals, give one")
    name, given = ("global_scale", global_scale) if encode_scale is None else ("encode_scale", encode_scale)
    if given is None:
        return _default_scales(x, convention)
    if not isinstance(given, torch.Tensor | float | int):
        raise LabError(f"{name}: {type(given).__name__}, needs a number or a float32 torch.Tensor")
    if not isinstance(given, torch.Tensor):
        given = torch.tensor(given, dtype=torch.float32, device=x.device)
    require_global_scale(name, given, x.shape)
    require_device(name, given, x.device)
    if not bool(((given > 0) & torch.isfinite(given)).all()):
        raise LabError(f"{name}: {given.tolist()}, needs positive finite numbers")
    return (given, 1.0 / given) if name == "global_scale" else (1.0 / given, given)


def _slices(global_scale: torch.Tensor) -> Iterator[tuple[int, int | slice]]:
    """(index of a global scale, the part of the first dimension that it covers)."""
    return enumerate(range(global_scale.numel()) if global_scale.ndim else (slice(None),))


def _for_chunks(work: Callable[[slice], None], blocks: torch.Tensor) -> None:
    """Call `work` on slices that cover the rows of `blocks`."""
    step = _CPU_CHUNK_BLOCKS if blocks.device.type == "cpu" else _GPU_CHUNK_BLOCKS
    for start in range(0, blocks.shape[0], step):
        work(slice(start, start + step))
