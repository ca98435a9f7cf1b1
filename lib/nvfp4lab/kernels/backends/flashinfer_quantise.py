"""FlashInfer's activation quantisers, in each scale layout. Read in flashinfer 0.6.15.post1, quantization/fp4_quantization.py."""

import dataclasses
from collections.abc import Callable

import torch

from nvfp4lab.kernels.backends.base import Launch, needs_gpu
from nvfp4lab.kernels.backends.cute_dsl import mark_compiles
from nvfp4lab.kernels.operands import QuantiseProblem
from nvfp4lab.kernels.shapes import BLOCK, QuantiseShape
from nvfp4lab.nvfp4.layouts import LINEAR, SWIZZLED_8X4, SWIZZLED_128X4, ScaleLayout
from nvfp4lab.records import Target

_SF_LAYOUT = {SWIZZLED_128X4.name: "layout_128x4", SWIZZLED_8X4.name: "layout_8x4", LINEAR.name: "layout_linear"}


@dataclasses.dataclass(frozen=True)
class FlashinferQuantise:
    """`nvfp4_quantize`, or the `fp4_quantize` that SGLang calls; scales are put back in linear order to be compared."""

    layout: ScaleLayout
    kernel: str = "cuda"
    function: str = "nvfp4_quantize"
    op: str = "quantise"
    activations: str = "bf16"
    arithmetic: str = "fp32"
    conventions: tuple[str, ...] = ()
    variants: tuple[str, ...] = ("cuda_graph",)

    @property
    def name(self) -> str:
        return f"flashinfer.{self.function}.{self.kernel}.{self.layout.name}"

    def is_available(self) -> str | None:
        return needs_gpu("flashinfer")

    def can_run(self, target: Target, shape: QuantiseShape) -> str | None:
        return None

    def prepare(self, problem: QuantiseProblem) -> None:
        return None

    def bind(self, prepared: None, problem: QuantiseProblem, out: torch.Tensor) -> Launch:
        mark_compiles(self.kernel)
        rows, columns = problem.x.shape
        quantise = self._call(problem)

        def launch() -> torch.Tensor:
            codes, scales = quantise()
            stored = scales.view(torch.uint8).reshape(self.layout.padded_shape(rows, columns // BLOCK))
            linear = self.layout.to_linear(stored.contiguous(), rows, columns // BLOCK)
            return torch.cat([codes.view(torch.uint8), linear], -1)

        return launch

    def _call(self, problem: QuantiseProblem) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
        import flashinfer

        x, scale = problem.x, problem.encode_scale.reshape(1)
        if self.function == "fp4_quantize":
            swizzled, narrow = self.layout is not LINEAR, self.layout is SWIZZLED_8X4
            return lambda: flashinfer.fp4_quantize(
                x, scale, BLOCK, is_sf_swizzled_layout=swizzled, is_sf_8x4_layout=narrow, backend=self.kernel
            )
        layout = getattr(flashinfer.SfLayout, _SF_LAYOUT[self.layout.name])
        return lambda: flashinfer.nvfp4_quantize(x, scale, sfLayout=layout, do_shuffle=False, backend=self.kernel)


@dataclasses.dataclass(frozen=True)
class CodecQuantise:
    """The lab's own codec under one convention: the CPU stand-in, and a check of the probe."""

    convention: str
    op: str = "quantise"
    activations: str = "bf16"
    arithmetic: str = "fp32"
    conventions: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"codec.{self.convention}"

    def is_available(self) -> str | None:
        return None

    def can_run(self, target: Target, shape: QuantiseShape) -> str | None:
        return None

    def prepare(self, problem: QuantiseProblem) -> None:
        return None

    def bind(self, prepared: None, problem: QuantiseProblem, out: torch.Tensor) -> Launch:
        from nvfp4lab.kernels.probes_quantise import as_bytes
        from nvfp4lab.nvfp4 import codec
        from nvfp4lab.nvfp4.conventions import CONVENTIONS

        convention = CONVENTIONS[self.convention]
        return lambda: out.copy_(as_bytes(codec.quantize(problem.x, encode_scale=problem.encode_scale, convention=convention)))


BACKENDS = (
    *(CodecQuantise(name) for name in ("modelopt", "flashinfer")),
    *(FlashinferQuantise(layout) for layout in (LINEAR, SWIZZLED_128X4, SWIZZLED_8X4)),
    FlashinferQuantise(SWIZZLED_128X4, "cute-dsl"),
    *(FlashinferQuantise(layout, function="fp4_quantize") for layout in (LINEAR, SWIZZLED_128X4)),
)
