"""NVFP4 quantise and dequantise, bit for bit as a named convention does it.

    t = quantize(x)                       # NVFP4Tensor: codes, block_scale, global_scale
    y = dequantize(t, torch.bfloat16)

Plain torch, the same code on CPU and GPU. Two look-up tables carry it: 65,536 bytes from the upper half of a scaled
fp32 value to its E2M1 code, and 65,536 pairs from (block scale, byte of two codes) to the two values. Work goes in
chunks that stay in cache, so the memory beyond input and output is a few MiB.
"""

import dataclasses
import functools
from collections.abc import Iterator

import torch

from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4.conventions import (
    BLOCK_SIZE,
    E2M1_MAX,
    E2M1_MIDPOINTS,
    E2M1_VALUES,
    E4M3_MAX,
    MODELOPT,
    BlockScaleRule,
    Convention,
    ElementRule,
    TieRule,
    ZeroSign,
)

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CPU_CHUNK_BLOCKS = 1 << 14  # 1 MiB of fp32: stays in a core's L2
_GPU_CHUNK_BLOCKS = 1 << 22


@dataclasses.dataclass(frozen=True)
class NVFP4Tensor:
    """A quantised tensor [..., K]; all three parts on one device, contiguous.

    codes: uint8 [..., K/2], the low nibble is the even column.
    block_scale: float8_e4m3fn [..., K/16], linear (unswizzled).
    global_scale: float32, 0-dim for the whole tensor or [E] for one per slice of the first dimension.
    Value of an element: E2M1(code) * block_scale * global_scale.
    Raises LabError when the parts do not fit together.
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor

    def __post_init__(self):
        _require_dtype("codes", self.codes, (torch.uint8,))
        _require_dtype("block_scale", self.block_scale, (torch.float8_e4m3fn,))
        _require_layout("codes", self.codes, 1)
        _require_layout("block_scale", self.block_scale, 1)
        if self.codes.shape[-1] % (BLOCK_SIZE // 2):
            raise LabError(f"codes: last dimension {self.codes.shape[-1]} bytes; needs a multiple of 8 (one block is 16 codes)")
        needed = (*self.codes.shape[:-1], self.codes.shape[-1] * 2 // BLOCK_SIZE)
        if tuple(self.block_scale.shape) != needed:
            raise LabError(
                f"block_scale: shape {tuple(self.block_scale.shape)}, needs {needed} for codes {tuple(self.codes.shape)}, linear; "
                "a swizzled or padded one goes through nvfp4lab.nvfp4.layouts first"
            )
        _require_global_scale(self.global_scale, self.codes.shape)
        for name, part in (("block_scale", self.block_scale), ("global_scale", self.global_scale)):
            if part.device != self.codes.device:
                raise LabError(f"{name}: on {part.device}, needs {self.codes.device} where the codes are")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [..., K] of the tensor that was quantised."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)


def global_scale_of(x: torch.Tensor) -> torch.Tensor:
    """amax(|x|) / (6 * 448) as 0-dim float32: the largest block scale then is 448.

    1.0 for an all-zero x, as compressed-tensors has it (ModelOpt returns 0.0, which makes every later scale NaN).
    Raises LabError for an empty x and where amax is NaN or Inf: one such value would void the whole tensor.
    """
    _require_dtype("x", x, FLOAT_DTYPES)
    if x.numel() == 0:
        raise LabError(f"x: shape {tuple(x.shape)} has no elements to take a global scale from; pass global_scale")
    low, high = torch.aminmax(x)
    amax = torch.maximum(low.abs(), high.abs()).float()
    if not torch.isfinite(amax):
        raise LabError(f"x: its largest magnitude is {amax.item()}; clean the input, or pass the global_scale that is wanted")
    return torch.where(amax == 0, 1.0, amax / (E2M1_MAX * E4M3_MAX))


def quantize(
    x: torch.Tensor,
    *,
    global_scale: torch.Tensor | float | None = None,
    encode_scale: torch.Tensor | float | None = None,
    convention: Convention = MODELOPT,
) -> NVFP4Tensor:
    """Quantise x [..., K] (bf16, fp16 or fp32; contiguous; K a multiple of 16) under `convention`.

    global_scale: what dequantisation multiplies by, 0-dim or [E] (one per slice of x's first dimension); by default
    `global_scale_of(x)`. encode_scale: its reciprocal, as FlashInfer and compressed-tensors store it, instead. Give
    the one that the codec compared with is given: fp32 reciprocals do not round-trip.
    NaN and Inf in x go where the convention sends them. x without elements gives parts without elements, and needs
    a given scale. Raises LabError for any other input; nothing is cast or copied to fit.
    """
    _require_dtype("x", x, FLOAT_DTYPES)
    _require_layout("x", x, BLOCK_SIZE)
    g, e = _both_scales(x, global_scale, encode_scale)
    codes = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=torch.uint8, device=x.device)
    block_scale = torch.empty((*x.shape[:-1], x.shape[-1] // BLOCK_SIZE), dtype=torch.float8_e4m3fn, device=x.device)
    for index in range(g.numel()):
        part = slice(None) if g.ndim == 0 else index
        blocks, code_out, scale_out = (
            x[part].view(-1, BLOCK_SIZE),
            codes[part].view(-1, BLOCK_SIZE // 2),
            block_scale[part].view(-1),
        )
        for chunk in _chunks(blocks):
            code_out[chunk], scale_out[chunk] = _quantize_blocks(blocks[chunk], g.view(-1)[index], e.view(-1)[index], convention)
    return NVFP4Tensor(codes, block_scale, g)


def dequantize(t: NVFP4Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Values [..., K] in `dtype` (bf16, fp16 or fp32): E2M1(code) * (block_scale * global_scale).

    Both products in fp32, then one rounding to `dtype`, as ModelOpt and torchao do. Raises LabError for other dtypes.
    """
    if dtype not in FLOAT_DTYPES:
        raise LabError(f"dtype: {dtype}, needs one of {', '.join(map(str, FLOAT_DTYPES))}")
    out = torch.empty(t.shape, dtype=dtype, device=t.codes.device)
    pair_dtype = torch.int64 if dtype is torch.float32 else torch.int32  # one gather fetches two neighbours
    for index in range(t.global_scale.numel()):
        part = slice(None) if t.global_scale.ndim == 0 else index
        table = _value_pairs(t.global_scale.view(-1)[index], dtype).view(pair_dtype)
        code_bytes = t.codes[part].view(-1, BLOCK_SIZE // 2)
        scale_bytes = t.block_scale[part].view(torch.uint8).view(-1, 1)
        pairs = out[part].view(-1, BLOCK_SIZE).view(pair_dtype)
        for chunk in _chunks(code_bytes):
            row = scale_bytes[chunk].to(torch.int32).bitwise_left_shift_(8)
            torch.index_select(table, 0, (row | code_bytes[chunk]).view(-1), out=pairs[chunk].view(-1))
    return out


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] of packed codes -> uint8 [..., K] of one code 0..15 each."""
    _require_dtype("codes", codes, (torch.uint8,))
    _require_layout("codes", codes, 1)
    return torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] of codes 0..15 (not checked) -> uint8 [..., K/2], low nibble the even column."""
    _require_dtype("codes", codes, (torch.uint8,))
    _require_layout("codes", codes, 2)
    words = codes.view(torch.int16)  # little endian: the even column is the low byte
    return ((words & 0x0F) | (words >> 4)).to(torch.uint8)


def e2m1_values(device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [16]: the value of each code; code 8 is -0.0."""
    positive = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)
    return torch.cat((positive, -positive))


def _chunks(blocks: torch.Tensor) -> Iterator[slice]:
    step = _CPU_CHUNK_BLOCKS if blocks.device.type == "cpu" else _GPU_CHUNK_BLOCKS
    return (slice(start, start + step) for start in range(0, blocks.shape[0], step))


def _quantize_blocks(
    x: torch.Tensor, g: torch.Tensor, e: torch.Tensor, convention: Convention
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks [B, 16] -> (packed codes uint8 [B, 8], block scales e4m3 [B])."""
    x = x.float()
    stored = _block_scales(_block_amax(x, convention), g, e, convention)
    s = stored.float().view(-1, 1)
    match convention.element:
        case ElementRule.DIVIDE:
            scaled = x / (s * g)
        case ElementRule.DIVIDE_BY_S_OVER_E:
            scaled = x / (s / e)
        case ElementRule.TIMES_INV_G_OVER_S:
            scaled = x * ((1.0 / g) / s)
        case ElementRule.TIMES_RCP_S_RCP_E:
            # The kernel multiplies an all-zero block by 0, not by 1 / 0.
            scaled = x * torch.where(s == 0, torch.where((x == 0).all(-1, keepdim=True), 0.0, torch.inf), 1.0 / (s * (1.0 / e)))
    return pack(_round_to_codes(scaled, convention)), stored


def _block_amax(x: torch.Tensor, convention: Convention) -> torch.Tensor:
    """Largest magnitude of each row of [B, 16]. Halving by columns runs ten times faster here than `amax(-1)`."""
    larger = torch.fmax if convention.amax_skips_nan else torch.maximum
    x = x.abs()
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = larger(x[:, :half], x[:, half:])
    return x.view(-1)


def _block_scales(amax: torch.Tensor, g: torch.Tensor, e: torch.Tensor, convention: Convention) -> torch.Tensor:
    match convention.block_scale:
        case BlockScaleRule.AMAX_OVER_6G:
            scale = amax / (E2M1_MAX * g)
        case BlockScaleRule.AMAX_OVER_6_OVER_G:
            scale = amax / E2M1_MAX / g
        case BlockScaleRule.E_TIMES_AMAX_OVER_6:
            scale = e * (amax / E2M1_MAX)
        case BlockScaleRule.E_TIMES_AMAX_RCP_6:
            scale = e * (amax * (1.0 / torch.full_like(amax, E2M1_MAX)))
    scale = torch.where(scale == 0, convention.zero_block_scale, scale)
    return scale.clamp(min=convention.min_block_scale, max=E4M3_MAX).to(torch.float8_e4m3fn)


def _round_to_codes(scaled: torch.Tensor, convention: Convention) -> torch.Tensor:
    """fp32 scaled values -> uint8 E2M1 codes of the same shape.

    The table is indexed by the upper 16 bits, of which the lowest is set when any dropped bit was ("round to odd").
    Every midpoint has at most 3 significant bits, so no comparison with one changes.
    """
    if convention.zero_sign is ZeroSign.OF_VALUE:
        scaled = scaled + 0.0  # -0.0 becomes +0.0
    bits = scaled.view(torch.int32)
    upper = (bits & 0xFFFF).add_(0xFFFF).bitwise_or_(bits).bitwise_right_shift_(16).bitwise_and_(0xFFFF)
    table = _code_table(convention.ties, convention.nan_code, scaled.device)
    return table.index_select(0, upper.view(-1)).view(scaled.shape)


@functools.lru_cache(maxsize=16)
def _code_table(ties: TieRule, nan_code: int, device: torch.device) -> torch.Tensor:
    """uint8 [65536]: the E2M1 code of every bf16 bit pattern."""
    patterns = torch.arange(1 << 15, dtype=torch.int32)
    magnitude = (patterns << 16).view(torch.float32)
    code = torch.zeros(1 << 15, dtype=torch.uint8)
    for lower_code, midpoint in enumerate(E2M1_MIDPOINTS):
        up_at_tie = ties is TieRule.AWAY or (ties is TieRule.TO_EVEN and lower_code % 2 == 1)
        code += (magnitude >= midpoint) if up_at_tie else (magnitude > midpoint)
    code[magnitude.isnan()] = nan_code
    return torch.cat((code, code | 8)).to(device)


def _value_pairs(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`dtype` [65536 * 2]: both values of every byte of codes under every E4M3 byte, row = scale byte * 256 + code byte."""
    every_byte = torch.arange(256, dtype=torch.uint8, device=g.device)
    scale = every_byte.view(torch.float8_e4m3fn).float() * g
    pair = e2m1_values(g.device)[unpack(every_byte.view(-1, 1)).long()]  # [256, 2]
    return (scale.view(-1, 1, 1) * pair).to(dtype).view(-1)


def _both_scales(x: torch.Tensor, global_scale, encode_scale) -> tuple[torch.Tensor, torch.Tensor]:
    """(g, 1 / g), whichever was given taken as it is."""
    if global_scale is not None and encode_scale is not None:
        raise LabError("global_scale and encode_scale were both given; they are reciprocals, give one")
    given = encode_scale if encode_scale is not None else global_scale
    if given is None:
        given = global_scale_of(x)
    elif not isinstance(given, torch.Tensor):
        given = torch.tensor(given, dtype=torch.float32, device=x.device)
    _require_global_scale(given, x.shape)
    if given.device != x.device:
        raise LabError(f"scale: on {given.device}, needs {x.device} where x is")
    if not bool(((given > 0) & torch.isfinite(given)).all()):
        raise LabError(f"scale: {given.tolist()}, needs positive finite numbers")
    return (1.0 / given, given) if encode_scale is not None else (given, 1.0 / given)


def _require_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise LabError(f"{name}: {type(tensor).__name__}, needs a torch.Tensor")
    if tensor.dtype not in allowed:
        raise LabError(f"{name}: dtype {tensor.dtype}, needs {' or '.join(map(str, allowed))}")


def _require_layout(name: str, tensor: torch.Tensor, multiple: int) -> None:
    if tensor.ndim < 1 or tensor.shape[-1] % multiple:
        raise LabError(f"{name}: shape {tuple(tensor.shape)}, needs at least one dimension and the last a multiple of {multiple}")
    if not tensor.is_contiguous():
        strides = f"strides {tensor.stride()} for shape {tuple(tensor.shape)}"
        raise LabError(f"{name}: {strides}, needs contiguous; call .contiguous() if a copy is meant")


def _require_global_scale(scale: torch.Tensor, shape: tuple[int, ...]) -> None:
    _require_dtype("global_scale", scale, (torch.float32,))
    if scale.ndim and (len(shape) < 2 or tuple(scale.shape) != tuple(shape[:1])):
        raise LabError(f"global_scale: shape {tuple(scale.shape)}, needs () or ({shape[0]},), one per slice of the first dimension")
