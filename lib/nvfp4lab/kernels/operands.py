"""What a kernel is given: FP4 operands as plain tensors, a GEMM problem, a fused-MoE problem.

Codes stay unpacked (one per byte) and scales linear, because probes and faults must be able to touch a single one;
each backend packs, swizzles and shuffles for itself.
"""

import dataclasses
from collections.abc import Callable, Sequence

import torch

from nvfp4lab.errors import LabError
from nvfp4lab.kernels.shapes import BLOCK
from nvfp4lab.nvfp4 import codec


class ProbeError(LabError):
    """A probe that cannot serve as an oracle: its own invariants do not hold. Never the fault of a kernel."""


@dataclasses.dataclass(frozen=True)
class Fp4Operand:
    """An NVFP4 tensor: value = E2M1[code] x block_scale x global_scale.

    codes: uint8 [..., rows, K], 0..15.
    block_scale: float8_e4m3fn [..., rows, K / 16].
    global_scale: float32, scalar or one per leading index ([E] for stacked experts); the factor of dequantisation.
    """

    codes: torch.Tensor
    block_scale: torch.Tensor
    global_scale: torch.Tensor

    def __post_init__(self):
        *lead, columns = self.codes.shape
        needed, given = (*lead, columns // BLOCK), tuple(self.block_scale.shape)
        if columns % BLOCK or given != needed:
            raise ProbeError(f"codes {tuple(self.codes.shape)} need block scales {needed}, got {given}")

    def value(self, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Dequantised, in `dtype`; exact in float64, and in bfloat16 when global_scale is a power of two."""
        global_scale = self.global_scale.double()
        return (self.unscaled(torch.float64) * (global_scale[:, None, None] if global_scale.ndim else global_scale)).to(dtype)

    def unscaled(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """E2M1[code] x block_scale, without the global scale: what the tensor core multiplies. Exact in every dtype but fp16."""
        elements = codec.e2m1_values(self.codes.device).to(dtype)[self.codes.int()]
        return elements * self.block_scale.float().to(dtype).repeat_interleave(BLOCK, -1)

    def packed(self) -> codec.NVFP4Tensor:
        """The same tensor as the codec and checkpoints store it, two codes a byte."""
        return codec.NVFP4Tensor(codec.pack(self.codes), self.block_scale.contiguous(), self.global_scale)

    @classmethod
    def stack(cls, operands: Sequence["Fp4Operand"]) -> "Fp4Operand":
        """2-D operands of equal shape as one with a leading expert dimension."""
        codes, scales, global_scales = zip(
            *((one.codes, one.block_scale.view(torch.uint8), one.global_scale) for one in operands), strict=True
        )
        return cls(torch.stack(codes), torch.stack(scales).view(torch.float8_e4m3fn), torch.stack(global_scales))

    @classmethod
    def of(cls, tensor: codec.NVFP4Tensor) -> "Fp4Operand":
        """A quantised tensor opened up."""
        return cls(codec.unpack(tensor.codes), tensor.block_scale, tensor.global_scale)

    def rows(self, index: torch.Tensor | slice) -> "Fp4Operand":
        """The same operand with the chosen rows (second-to-last dimension)."""
        return dataclasses.replace(
            self, codes=self.codes[..., index, :], block_scale=self._scales(lambda bytes_: bytes_[..., index, :])
        )

    def experts(self, order: torch.Tensor) -> "Fp4Operand":
        """A stacked operand with its experts in another order."""
        return Fp4Operand(self.codes[order], self._scales(lambda bytes_: bytes_[order]), self.global_scale[order])

    def _scales(self, move: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Block scales moved about as bytes: not every device gathers 8-bit floats."""
        return move(self.block_scale.view(torch.uint8)).view(torch.float8_e4m3fn)

    def expert(self, index: int) -> "Fp4Operand":
        """One expert of a stacked operand, as a 2-D operand."""
        scale = self.global_scale[index] if self.global_scale.ndim else self.global_scale
        return Fp4Operand(self.codes[index], self.block_scale[index], scale)


Activations = Fp4Operand | torch.Tensor


def activation_values(activations: Activations, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Activations as numbers, whether they are FP4 or (W4A16) a bf16 tensor."""
    return activations.value(dtype) if isinstance(activations, Fp4Operand) else activations.to(dtype)


def activation_rows(activations: Activations, index: torch.Tensor | slice) -> Activations:
    """The chosen rows of the activations."""
    return activations.rows(index) if isinstance(activations, Fp4Operand) else activations[index]


@dataclasses.dataclass(frozen=True)
class GemmProblem:
    """out[M, N] = activations[M, K] x weights[N, K]^T, rounded once to `out_dtype`.

    activations: an Fp4Operand, or a bf16 tensor where only a weight-only (W4A16) kernel can take the values.
    original: the unquantised (activations, weights) in float32, where the problem came from quantising real numbers.
    """

    activations: Activations
    weights: Fp4Operand
    out_dtype: torch.dtype = torch.bfloat16
    original: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def device(self) -> torch.device:
        return self.weights.codes.device

    @property
    def out_shape(self) -> tuple[int, int]:
        first = self.activations.codes if isinstance(self.activations, Fp4Operand) else self.activations
        return first.shape[0], self.weights.codes.shape[0]


@dataclasses.dataclass(frozen=True)
class MoeProblem:
    """out[t] = sum_j topk_weights[t, j] x down_e(requantise(silu(gate_e(x_t)) x up_e(x_t))), e = topk_ids[t, j].

    gate, up: [E, I, H] with global scales [E]; down: [E, H, I] with global scales [E].
    topk_ids: int32 [T, top-k], global expert ids; topk_weights: float32 [T, top-k].
    intermediate_scale: float32 scalar, the global scale under which a W4A4 kernel requantises the intermediate.
    expert_offset: global id of the first expert held here; tokens of other experts contribute nothing.
    """

    activations: Activations
    gate: Fp4Operand
    up: Fp4Operand
    down: Fp4Operand
    topk_ids: torch.Tensor
    topk_weights: torch.Tensor
    intermediate_scale: torch.Tensor
    expert_offset: int = 0
    experts_global: int = 0
    out_dtype: torch.dtype = torch.bfloat16

    @property
    def device(self) -> torch.device:
        return self.gate.codes.device

    @property
    def experts(self) -> int:
        return self.gate.codes.shape[0]

    @property
    def out_shape(self) -> tuple[int, int]:
        return self.topk_ids.shape[0], self.down.codes.shape[1]


@dataclasses.dataclass(frozen=True)
class QuantiseProblem:
    """Codes and block scales of x under a given encode scale. x: bf16 [M, K]; encode_scale: float32 scalar, 1 / global scale.

    The output is bytes [M, K/2 + K/16]: packed codes, then linear block scales.
    """

    x: torch.Tensor
    encode_scale: torch.Tensor
    out_dtype: torch.dtype = torch.uint8

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def out_shape(self) -> tuple[int, int]:
        rows, columns = self.x.shape
        return rows, columns // 2 + columns // BLOCK


Problem = GemmProblem | MoeProblem | QuantiseProblem


def take_rows(problem: Problem, index: torch.Tensor | slice) -> Problem:
    """The same layer asked about some of its rows."""
    rows = activation_rows(problem.activations, index)
    if isinstance(problem, MoeProblem):
        return dataclasses.replace(
            problem, activations=rows, topk_ids=problem.topk_ids[index], topk_weights=problem.topk_weights[index]
        )
    return dataclasses.replace(problem, activations=rows)
