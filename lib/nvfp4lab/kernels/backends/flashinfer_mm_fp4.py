"""`flashinfer.mm_fp4` with every backend that the installed version lists, and the W4A16 `mm_bf16_fp4`.

Operands: packed codes, block scales swizzled 128x4; for TRT-LLM the weight's rows are shuffled by FlashInfer's own functions,
as SGLang does at load time (modelopt_quant.py, `is_flashinfer_trtllm`). Read in flashinfer 0.6.15.post1 and 0.7.4.
"""

import ast
import dataclasses
import functools
import importlib.util
from pathlib import Path

import torch

from nvfp4lab.kernels.backends.base import Launch, needs_gpu
from nvfp4lab.kernels.backends.cute_dsl import mark_compiles
from nvfp4lab.kernels.operands import Fp4Operand, GemmProblem, activation_values
from nvfp4lab.kernels.shapes import GemmShape
from nvfp4lab.nvfp4.layouts import SWIZZLED_128X4
from nvfp4lab.records import Target

_KNOWN_MM_FP4 = ("cudnn", "trtllm", "cutlass", "cute-dsl", "b12x", "auto")  # of 0.6.15.post1, where none is installed
_KNOWN_MM_BF16_FP4 = ("cudnn", "cute-dsl")


@functools.lru_cache(maxsize=8)
def listed_backends(function: str, module: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The literals that `function` of the installed flashinfer annotates its `backend` with, read without importing it."""
    spec = importlib.util.find_spec("flashinfer")
    source = Path(spec.origin).parent / module if spec and spec.origin else None
    if source is None or not source.exists():
        return known
    body = ast.parse(source.read_text(encoding="utf-8")).body
    aliases = {
        node.targets[0].id: node.value for node in body if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            annotations = [
                one.annotation for one in (*node.args.args, *node.args.kwonlyargs) if one.arg == "backend" and one.annotation
            ]
            named = [aliases[one.id] if isinstance(one, ast.Name) and one.id in aliases else one for one in annotations]
            literals = [c.value for one in named for c in ast.walk(one) if isinstance(c, ast.Constant) and isinstance(c.value, str)]
            return tuple(literals) or known
    return known


@dataclasses.dataclass(frozen=True)
class MmFp4:
    """`mm_fp4(backend=kernel)`. scale_8x4: the small-M layout of the activation scales, which only TRT-LLM takes."""

    kernel: str
    scale_8x4: bool = False
    op: str = "gemm"
    activations: str = "fp4"
    arithmetic: str = "fp4"
    conventions: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("tactics", "autotune", "off_bucket", "cuda_graph", "streams")

    @property
    def name(self) -> str:
        return f"flashinfer.mm_fp4.{self.kernel}" + ("_8x4" if self.scale_8x4 else "")

    def is_available(self) -> str | None:
        return needs_gpu("flashinfer")

    def can_run(self, target: Target, shape: GemmShape) -> str | None:
        return None

    def prepare(self, problem: GemmProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        codes, scale, global_scale = packed_swizzled(problem.weights)
        if self.kernel == "trtllm":
            from flashinfer import shuffle_matrix_a, shuffle_matrix_sf_a

            codes = shuffle_matrix_a(codes.view(torch.uint8), 128)
            scale = shuffle_matrix_sf_a(problem.weights.block_scale.view(torch.uint8), 128).reshape(scale.shape)
        return codes, scale, global_scale

    def bind(self, prepared: tuple[torch.Tensor, torch.Tensor, torch.Tensor], problem: GemmProblem, out: torch.Tensor) -> Launch:
        from flashinfer import mm_fp4

        mark_compiles(self.kernel)
        weight, weight_scale, weight_global = prepared
        codes, scale, activation_global = packed_swizzled(problem.activations, self.scale_8x4)
        alpha = (activation_global * weight_global).reshape(1)
        extra = {"use_8x4_sf_layout": True} if self.scale_8x4 else {}
        return lambda: mm_fp4(codes, weight.T, scale, weight_scale.T, alpha, out.dtype, out, backend=self.kernel, **extra)


def packed_swizzled(operand: Fp4Operand, scale_8x4: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(packed codes [rows, K/2], block scales as bytes in tiles, global scale)."""
    from nvfp4lab.nvfp4.layouts import SWIZZLED_8X4

    packed = operand.packed()
    layout = SWIZZLED_8X4 if scale_8x4 else SWIZZLED_128X4
    return packed.codes, layout.from_linear(packed.block_scale.view(torch.uint8)), packed.global_scale


@dataclasses.dataclass(frozen=True)
class MmBf16Fp4:
    """`mm_bf16_fp4(backend=kernel)` on weights from FlashInfer's `prepare_bf16_fp4_weights`."""

    kernel: str
    op: str = "gemm"
    activations: str = "bf16"
    arithmetic: str = "bf16"
    conventions: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("autotune", "off_bucket", "cuda_graph", "streams")

    @property
    def name(self) -> str:
        return f"flashinfer.mm_bf16_fp4.{self.kernel}"

    def is_available(self) -> str | None:
        return needs_gpu("flashinfer")

    def can_run(self, target: Target, shape: GemmShape) -> str | None:
        return None

    def prepare(self, problem: GemmProblem) -> tuple:
        from flashinfer import prepare_bf16_fp4_weights

        codes, scale, global_scale = packed_swizzled(problem.weights)
        return prepare_bf16_fp4_weights(codes, scale, global_scale.reshape(1), backend=self.kernel)

    def bind(self, prepared: tuple, problem: GemmProblem, out: torch.Tensor) -> Launch:
        from flashinfer import mm_bf16_fp4

        mark_compiles(self.kernel)
        x = activation_values(problem.activations, torch.bfloat16).contiguous()
        return lambda: mm_bf16_fp4(x, *prepared, backend=self.kernel, out_dtype=out.dtype, out=out)


BACKENDS = (
    *(MmFp4(kernel) for kernel in listed_backends("mm_fp4", "gemm/gemm_base.py", _KNOWN_MM_FP4)),
    MmFp4("trtllm", scale_8x4=True),
    *(MmBf16Fp4(kernel) for kernel in listed_backends("mm_bf16_fp4", "gemm/gemm_bf16_fp4.py", _KNOWN_MM_BF16_FP4)),
)
