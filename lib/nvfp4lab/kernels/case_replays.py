"""Field bugs that concern a kernel, as cases: the same call at the size that was reported.

`report` is the id in data/field_reports.jsonl, or the upstream issue where the reports have none. A replay that is clean says
that the bug is not here under this stack, not that it never was.
"""

import dataclasses

from nvfp4lab.kernels.cases import Case, Option
from nvfp4lab.kernels.shapes import GemmShape, MoeShape, QuantiseShape, Shape


@dataclasses.dataclass(frozen=True)
class Replay:
    """backends: name prefixes; every backend of that prefix gets the case."""

    report: str
    backends: tuple[str, ...]
    probe: str
    shapes: tuple[Shape, ...]
    variant: str = "plain"

    def cases(self, backend: str) -> tuple[Case, ...]:
        """Its cases for one backend, none if the report does not concern it."""
        if not any(backend == name or backend.startswith(f"{name}.") for name in self.backends):
            return ()
        options: tuple[tuple[str, Option], ...] = () if self.variant == "plain" else (("variant", self.variant),)
        return tuple(Case(backend, self.probe, shape, options=options, source=f"report {self.report}") for shape in self.shapes)


_MM, _CUTLASS_MOE, _B12X_MOE = ("flashinfer.mm_fp4",), ("flashinfer.cutlass_fused_moe",), ("flashinfer.b12x_fused_moe",)
_TRTLLM_MOE = ("flashinfer.trtllm_fp4_block_scale_routed_moe", "flashinfer.trtllm_fp4_block_scale_moe")
_GROUPED = ("sglang.cutlass_fp4_group_mm", *_CUTLASS_MOE)

REPLAYS: tuple[Replay, ...] = (
    Replay("fi-3398-bf16-global-scale-zeros", _MM, "exact_t24", tuple(GemmShape(m, 2048, 2048) for m in (384, 512, 1024, 1000))),
    Replay("fi-3398-bf16-global-scale-zeros", ("flashinfer.nvfp4_quantize",), "quantise_codes", (QuantiseShape(384, 2048),)),
    Replay("fi-2577-mmfp4-sm120-all-backends", _MM, "exact_t24", (GemmShape(128, 512, 256),)),
    Replay("flashinfer #3192", _MM, "exact_t24", (GemmShape(2001, 10304, 2688),), "off_bucket"),
    Replay("sgl-20047-auto-cudnn-on-sm120", _MM, "exact_t24", (GemmShape(2000, 4096, 4096),)),
    Replay(
        "fi-3367-autotune-cache-collision",
        ("flashinfer.mm_fp4.trtllm", "flashinfer.mm_fp4.trtllm_8x4"),
        "exact_t24",
        (GemmShape(8, 512, 512),),
        "autotune",
    ),
    Replay("fi-2708-gdc-pdl-race-gemm", _MM, "exact_t24", (GemmShape(64, 4096, 4096),), "streams"),
    Replay(
        "fi-3197-autotuned-wrong-dsv4", (*_TRTLLM_MOE, *_CUTLASS_MOE), "exact_moe", (MoeShape(64, 7168, 2048, 16, 8),), "autotune"
    ),
    Replay("vllm-45888-kimi-graphs-garbage", _CUTLASS_MOE, "exact_moe", (MoeShape(16, 7168, 2048, 16, 8),), "cuda_graph"),
    Replay(
        "fi-4854-untuned-fallback-nonfinite",
        _TRTLLM_MOE,
        "exact_moe",
        (MoeShape(6144, 2048, 768, 32, 8), MoeShape(8192, 2048, 768, 32, 8)),
    ),
    Replay("sgl-26324-minimax-ufffd-trtllm", _TRTLLM_MOE, "exact_moe", (MoeShape(64, 3072, 1536, 32, 8),)),
    Replay("cutlass-3096-grouped-gemm-garbage", _GROUPED, "exact_moe", (MoeShape(64, 4096, 1024, 32, 10),)),
    Replay("fi-2913-gdc-pdl-race-fused-moe", _CUTLASS_MOE, "exact_moe", (MoeShape(64, 4096, 1024, 16, 8),), "streams"),
    Replay("cutlass-2760-sm90-grouped-pdl", _GROUPED, "moe_repeat", (MoeShape(64, 2048, 768, 16, 8),)),
    Replay(
        "vllm-35497-hidden-dim-not-128",
        (*_GROUPED, *_B12X_MOE, "sglang.moe_wna16_marlin_gemm"),
        "exact_moe",
        (MoeShape(33, 2880, 1408, 4, 2),),
    ),
    Replay("fi-5446-b12x-512-experts-640", _B12X_MOE, "exact_moe", (MoeShape(512, 2048, 640, 512, 10),)),
    Replay("vllm-47365-b12x-garbage-tp", _B12X_MOE, "exact_moe", (MoeShape(33, 4096, 512, 32, 8), MoeShape(33, 4096, 256, 32, 8))),
    Replay(
        "fi-3383-b12x-ep-spec", (*_B12X_MOE, *_CUTLASS_MOE, *_TRTLLM_MOE), "exact_moe", (MoeShape(33, 4096, 1024, 16, 8, 112, 128),)
    ),
    Replay(
        "note-step37-unservable-tp8",
        (*_CUTLASS_MOE, *_TRTLLM_MOE, *_B12X_MOE, "sglang.moe_wna16_marlin_gemm"),
        "exact_moe",
        (MoeShape(33, 4096, 160, 8, 2), MoeShape(33, 4096, 320, 8, 2)),
    ),
)
