"""The checks that others publish, re-implemented from their stated criteria, to be measured beside ours.

Each takes the kernel's output, the float64 result on the dequantised operands, and the product of the operands before
quantisation (where the published test compares with that), and says whether the published test would pass.
"""

import dataclasses
import math
from collections.abc import Callable

import torch

Check = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]


@dataclasses.dataclass(frozen=True)
class PublishedGate:
    """ops: what it is used for, or was measured on. source: project, file and line as read; criterion: in words.

    output_std: size of the outputs in that test where an absolute tolerance depends on it; None: that of normal operands.
    """

    name: str
    ops: tuple[str, ...]
    source: str
    criterion: str
    check: Check
    output_std: float | None = None

    def passes(self, actual: torch.Tensor, exact: torch.Tensor, original: torch.Tensor) -> bool:
        """Whether the published test would pass. All [rows, columns]; exact, original: float64."""
        if self.output_std is None:
            return self.check(actual, exact, original)
        factor = 2.0 ** round(math.log2(self.output_std / exact.std().item()))  # a power of two: bf16 keeps its bits
        return self.check(actual * factor, exact * factor, original * factor)


def _cosine(actual: torch.Tensor, reference: torch.Tensor) -> float:
    """As `F.cosine_similarity` of both flattened in float32; NaN where the output holds one."""
    return torch.nn.functional.cosine_similarity(actual.float().flatten(), reference.float().flatten(), dim=0).item()


def _cosine_above(limit: float) -> Check:
    return lambda actual, _, original: _cosine(actual, original) > limit


def _relative_l2_and_cosine(actual: torch.Tensor, exact: torch.Tensor, original: torch.Tensor) -> bool:
    error = (actual.double() - exact).norm() / exact.norm()
    return bool(error < 2e-2) and _cosine(actual, exact) > 0.999


def _all_close(absolute: float, relative: float) -> Check:
    return lambda actual, exact, _: torch.allclose(actual.double(), exact, atol=absolute, rtol=relative)


def _finite_share_close(absolute: float, relative: float, share: float) -> Check:
    """isclose(reference, actual): the relative part is of the *actual*, so a result that is too large passes more easily."""

    def passes(actual: torch.Tensor, exact: torch.Tensor, original: torch.Tensor) -> bool:
        close = torch.isclose(exact, actual.double(), atol=absolute, rtol=relative).double().mean().item()
        return bool(torch.isfinite(actual).all()) and close >= share

    return passes


def _share_within_std(actual: torch.Tensor, exact: torch.Tensor, original: torch.Tensor) -> bool:
    error = (actual.double() - original.double()).abs()
    limit = max(0.05, 1.5 * original.double().std().item())
    close = (error < limit) | (error / original.double().abs().clamp_min(1e-12) < 0.5)
    return close.double().mean().item() >= 0.97


def _not_below(limit: float) -> Check:
    """Complains if the cosine is *below* the limit; NaN is not below anything."""
    return lambda actual, _, original: not _cosine(actual, original) < limit


def _share_matched(actual: torch.Tensor, exact: torch.Tensor, original: torch.Tensor) -> bool:
    """Counts the elements that exceed both tolerances of 1e-2; NaN exceeds neither."""
    error = (actual.double() - exact).abs()
    exceeds = (error > 1e-2) & (error / exact.abs().clamp_min(1e-12) > 1e-2)
    return 1 - exceeds.double().mean().item() >= 0.95


def _max_error(limit: float) -> Check:
    return lambda actual, exact, _: bool((actual.double() - exact).abs().max() < limit)


_GEMM, _MOE, _BOTH = ("gemm",), ("moe",), ("gemm", "moe")
PUBLISHED: tuple[PublishedGate, ...] = (
    PublishedGate("fi mm_fp4", _GEMM, "flashinfer tests/gemm/test_mm_fp4.py:111", "cosine > 0.97", _cosine_above(0.97)),
    PublishedGate(
        "fi benchmark", _GEMM, "flashinfer benchmarks/routines/gemm.py, testMmFp4", "not cosine < 0.97", _not_below(0.97)
    ),
    PublishedGate(
        "fi grouped_mm", _GEMM, "flashinfer tests/grouped_mm/test_grouped_mm_fp4.py:22", "cosine > 0.9", _cosine_above(0.9)
    ),
    PublishedGate(
        "fi mm_bf16_fp4",
        _GEMM,
        "flashinfer tests/gemm/test_mm_bf16_fp4.py:154",
        "rel. L2 < 2e-2, cosine > 0.999",
        _relative_l2_and_cosine,
    ),
    PublishedGate(
        "sgl/vllm dense", _GEMM, "sglang sgl-kernel/tests/test_fp4_gemm.py", "assert_close 1e-1 / 1e-1", _all_close(0.1, 0.1)
    ),
    PublishedGate("KernelBench bf16", _GEMM, "KernelBench eval.py:83", "allclose 1e-2", _all_close(1e-2, 1e-2)),
    PublishedGate(
        "quack bf16", _GEMM, "quack tests/test_gemm_sm100_blockscaled.py", "max abs error < 5e-3", _max_error(5e-3), 256**-0.5
    ),
    PublishedGate(
        "fi trtllm moe",
        _BOTH,
        "flashinfer tests/moe/trtllm_gen_fused_moe_utils.py:962",
        "finite, 0.1 / 0.85 of the actual, 92 %",
        _finite_share_close(0.1, 0.85, 0.92),
    ),
    PublishedGate(
        "fi moe utils",
        _BOTH,
        "flashinfer tests/moe/utils.py:965",
        "abs < max(.05, 1.5 std) or rel < .5, 97 %",
        _share_within_std,
    ),
    PublishedGate(
        "fi cutlass moe",
        _MOE,
        "flashinfer tests/moe/test_trtllm_cutlass_fused_moe.py:935",
        "assert_close 2e-1 / 2e-1",
        _all_close(0.2, 0.2),
    ),
    PublishedGate("vllm moe", _MOE, "vllm tests/kernels/moe/test_nvfp4_moe.py", "assert_close 1e-1 / 1e-1", _all_close(0.1, 0.1)),
    PublishedGate("flashinfer-bench", _MOE, "flashinfer-bench evaluators/lowbit.py", "1e-2 / 1e-2, 95 % matched", _share_matched),
)
