"""NVFP4Tensor, its packing, and the checks that say what was given and what was needed."""

import dataclasses

import torch

from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4.conventions import BLOCK_SIZE, CONVENTIONS, E2M1_VALUES, Convention

FLOAT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
        require_dtype("codes", self.codes, (torch.uint8,))
        require_dtype("block_scale", self.block_scale, (torch.float8_e4m3fn,))
        require_layout("codes", self.codes, BLOCK_SIZE // 2)
        require_layout("block_scale", self.block_scale, 1)
        needed = (*self.codes.shape[:-1], self.codes.shape[-1] * 2 // BLOCK_SIZE)
        if tuple(self.block_scale.shape) != needed:
            raise LabError(
                f"block_scale: shape {tuple(self.block_scale.shape)}, needs {needed} for codes {tuple(self.codes.shape)}, linear; "
                "bring a swizzled or padded one back with nvfp4lab.nvfp4.layouts first"
            )
        require_global_scale("global_scale", self.global_scale, self.shape)
        require_device("block_scale", self.block_scale, self.codes.device)
        require_device("global_scale", self.global_scale, self.codes.device)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [..., K] of the tensor that was quantised."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2)


def e2m1_values(device: torch.device | str = "cpu") -> torch.Tensor:
    """float32 [16]: the value of each code; code 8 is -0.0."""
    positive = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=device)
    return torch.cat((positive, -positive))


def unpack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K/2] of packed codes -> uint8 [..., K] of one code 0..15 each."""
    require_dtype("codes", codes, (torch.uint8,))
    require_layout("codes", codes, 1)
    return torch.stack((codes & 0xF, codes >> 4), dim=-1).flatten(-2)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [..., K] of codes 0..15 -> uint8 [..., K/2], low nibble the even column. K even. Codes are not range-checked."""
    require_dtype("codes", codes, (torch.uint8,))
    require_layout("codes", codes, 2)
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def require_dtype(name: str, tensor: torch.Tensor, allowed: tuple[torch.dtype, ...]) -> None:
    """LabError unless `tensor` is a torch.Tensor of an allowed dtype."""
    if not isinstance(tensor, torch.Tensor):
        raise LabError(f"{name}: {type(tensor).__name__}, needs a torch.Tensor")
    if tensor.dtype not in allowed:
        raise LabError(f"{name}: dtype {tensor.dtype}, needs {' or '.join(map(str, allowed))}")


def require_convention(convention: Convention) -> None:
    """LabError for the name of a convention in the place of one, and for anything else."""
    if not isinstance(convention, Convention):
        raise LabError(f"convention: {convention!r}, needs a Convention; CONVENTIONS has {', '.join(CONVENTIONS)} by name")


def require_layout(name: str, tensor: torch.Tensor, multiple: int) -> None:
    """LabError unless `tensor` is contiguous and its last dimension a multiple of `multiple`."""
    if tensor.ndim < 1 or tensor.shape[-1] % multiple:
        raise LabError(f"{name}: shape {tuple(tensor.shape)}, needs a last dimension that is a multiple of {multiple}")
    if not tensor.is_contiguous():
        strides = f"strides {tensor.stride()} for shape {tuple(tensor.shape)}"
        raise LabError(f"{name}: {strides}, needs contiguous; call .contiguous() where a copy is meant")


def require_device(name: str, tensor: torch.Tensor, device: torch.device) -> None:
    """LabError unless `tensor` is on `device`."""
    if tensor.device != device:
        raise LabError(f"{name}: on {tensor.device}, needs {device} like the data")


def require_global_scale(name: str, scale: torch.Tensor, shape: tuple[int, ...]) -> None:
    """LabError unless `scale` is float32 and 0-dim, or one per slice of the first of at least two dimensions of `shape`."""
    require_dtype(name, scale, (torch.float32,))
    if scale.ndim and (len(shape) < 2 or tuple(scale.shape) != tuple(shape[:1])):
        per_slice = f" or ({shape[0]},), one per slice of the first dimension" if len(shape) > 1 else ""
        raise LabError(f"{name}: shape {tuple(scale.shape)}, needs (){per_slice}")
