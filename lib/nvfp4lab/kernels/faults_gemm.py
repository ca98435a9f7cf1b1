"""Broken GEMM kernels: bugs that were shipped, that a published check was seen to let through, or that a class of mistake makes."""

import dataclasses
import math
from collections.abc import Callable

import torch

from nvfp4lab.kernels import reference, reference_marlin
from nvfp4lab.kernels.faults import (
    Fault,
    Inject,
    instead,
    on_activations,
    on_output,
    on_weights,
    one_value,
    one_wrong_code,
    one_wrong_scale,
    scaled,
    with_codes,
    with_scales,
)
from nvfp4lab.kernels.faults_arithmetic import (
    all_one_ulp,
    narrow_accumulator,
    one_ulp,
    round_twice,
    rounded_by,
    ties_away,
    truncate_to_bf16,
)
from nvfp4lab.kernels.operands import Fp4Operand, GemmProblem, Problem, take_rows
from nvfp4lab.kernels.reference import Kernel, Order
from nvfp4lab.kernels.shapes import BLOCK
from nvfp4lab.nvfp4.conventions import E4M3_MIN_NORMAL


def _set(rows: slice, columns: slice, value: float) -> Inject:
    def edit(out: torch.Tensor, problem: Problem) -> None:
        out[rows, columns] = value

    return on_output(edit)


ALL = slice(None)


def _swap_groups(scales: torch.Tensor) -> torch.Tensor:
    """Rows 0-31 and 32-63 exchanged: two strides of the 128x4 layout taken for each other in the first tile."""
    rows = torch.arange(scales.shape[0], device=scales.device)
    partner = torch.where(rows < 64, rows ^ 32, rows)
    return scales[torch.where(partner < scales.shape[0], partner, rows)]


def _columns_dropped(keep: Callable[[int], int]) -> Inject:
    """Only the first keep(K) columns are multiplied."""

    def cut(operand: Fp4Operand) -> Fp4Operand:
        return with_codes(operand, lambda codes: codes.index_fill_(-1, torch.arange(keep(codes.shape[-1]), codes.shape[-1]), 0))

    return on_weights(cut)


def _replace_code(old: int, new: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda codes: torch.where(codes == old, new, codes).to(torch.uint8)


def _half_as_zero(codes: torch.Tensor) -> torch.Tensor:
    return torch.where(codes & 7 == 1, 0, codes).to(torch.uint8)


def _swap_nibbles(codes: torch.Tensor) -> torch.Tensor:
    return codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _scales_to_powers(operand: Fp4Operand) -> Fp4Operand:
    """Block scales read as E8M0: the mantissa is lost."""
    return with_scales(operand, lambda scales: torch.exp2(torch.floor(torch.log2(scales))))


def _subnormal_scales_flushed(operand: Fp4Operand) -> Fp4Operand:
    return with_scales(operand, lambda scales: torch.where(scales < E4M3_MIN_NORMAL, 0.0, scales))


def _six_as_five(kernel: Kernel) -> Kernel:
    """5 is no E2M1 value, so the operand is split: everything as it is, minus 1 where there is a 6."""

    def broken(problem: GemmProblem, out: torch.Tensor) -> torch.Tensor:
        ones = with_codes(problem.weights, lambda codes: torch.where(codes & 7 == 7, (codes & 8) | 2, 0).to(torch.uint8))
        whole = kernel(problem, torch.empty_like(out)).float()
        return out.copy_(whole - kernel(dataclasses.replace(problem, weights=ones), torch.empty_like(out)).float())

    return broken


def _swap_rows(out: torch.Tensor, problem: Problem) -> None:
    if out.shape[0] > 1:
        out[:2] = out[:2].flip(0)


def _swap_columns(out: torch.Tensor, problem: Problem) -> None:
    out[:, :16] = out[:, :16].unflatten(1, (-1, 2)).flip(2).flatten(1)


def _tail_rows(value: float, when: Callable[[int], bool], start: Callable[[int], int]) -> Inject:
    def edit(out: torch.Tensor, problem: Problem) -> None:
        if when(out.shape[0]):
            out[start(out.shape[0]) :] = value

    return on_output(edit)


def _writes_past_end(kernel: Kernel) -> Kernel:
    """Stores a full tile where the last one is partial."""

    def broken(problem: Problem, out: torch.Tensor) -> torch.Tensor:
        result = kernel(problem, out)
        rows, columns = result.shape
        if result.data_ptr() == out.data_ptr() and rows % 16:
            torch.as_strided(result, (rows + 1, columns), (columns, 1))[rows] = 0
        return result

    return broken


def _stale(kernel: Kernel) -> Kernel:
    """A workspace keyed by shape: the second call of a shape gets the first one's output."""
    kept: dict[tuple[int, int], torch.Tensor] = {}

    def broken(problem: Problem, out: torch.Tensor) -> torch.Tensor:
        if problem.out_shape not in kept:
            kept[problem.out_shape] = kernel(problem, out).clone()
        return out.copy_(kept[problem.out_shape])

    return broken


def _race(every: int) -> Inject:
    """One 128x16 tile is noisy in one call of `every`."""

    def inject(kernel: Kernel) -> Kernel:
        calls = 0

        def broken(problem: Problem, out: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            result = kernel(problem, out)
            if calls % every == 0:
                result[:128, :16] *= 1 + 2.0**-6
            return result

        return broken

    return inject


def _adds_to_output(kernel: Kernel) -> Kernel:
    def broken(problem: Problem, out: torch.Tensor) -> torch.Tensor:
        before = out.clone()
        return kernel(problem, out).add_(before)

    return broken


def _single_row_path(kernel: Kernel) -> Kernel:
    """A GEMV path for M = 1 that forgets the last block of K."""
    broken_path = _columns_dropped(lambda k: k - BLOCK)(kernel)
    return lambda problem, out: (broken_path if problem.out_shape[0] == 1 else kernel)(problem, out)


def _one_bad_bucket(kernel: Kernel) -> Kernel:
    """A tactic for 32 < M <= 64 that was tuned for another graph and adds the rows up in the wrong order."""
    return lambda problem, out: (
        kernel(take_rows(problem, slice(None)), out).copy_(out.roll(1, 0))
        if 32 < problem.out_shape[0] <= 64
        else kernel(problem, out)
    )


def _round_scale_to_bf16(operand: Fp4Operand) -> Fp4Operand:
    return dataclasses.replace(operand, global_scale=operand.global_scale.bfloat16().float())


_TABLE = "published checks were seen to let it through"
_GEMM: tuple[tuple[str, str, Inject], ...] = (
    ("one NaN", _TABLE, one_value(math.nan)),
    ("all NaN", _TABLE, _set(ALL, ALL, math.nan)),
    ("one Inf", "overflow", one_value(math.inf)),
    ("tile 128x16 zeroed", _TABLE, _set(slice(0, 128), slice(0, 16), 0.0)),
    ("last row zero", _TABLE, _set(slice(-1, None), ALL, 0.0)),
    ("last K block dropped", _TABLE, _columns_dropped(lambda k: k - BLOCK)),
    ("K tail past a multiple of 64 dropped", "tail mask", _columns_dropped(lambda k: k - k % 64)),
    ("scale rows 0-31 and 32-63 swapped", _TABLE, on_weights(lambda x: with_scales(x, _swap_groups))),
    ("scales shifted by one block", _TABLE, on_weights(lambda x: with_scales(x, lambda s: s.roll(1, -1)))),
    ("scales shifted by one row", "swizzle", on_weights(lambda x: with_scales(x, lambda s: s.roll(1, 0)))),
    ("activation block scales ignored", "scale layout", on_activations(lambda x: with_scales(x, torch.ones_like))),
    ("E4M3 mantissa ignored", "read as E8M0", on_weights(_scales_to_powers)),
    ("E4M3 subnormal scales flushed", "flush to zero", on_weights(_subnormal_scales_flushed)),
    ("one wrong weight code", "published tolerance lets it through", on_weights(lambda x: with_codes(x, one_wrong_code))),
    ("one wrong activation code", "published tolerance lets it through", on_activations(lambda x: with_codes(x, one_wrong_code))),
    ("one wrong scale", "published tolerance lets it through", on_weights(lambda x: with_scales(x, one_wrong_scale))),
    ("6.0 decoded as 5.0", _TABLE, _six_as_five),
    ("-0.5 decoded as +0.5", _TABLE, on_weights(lambda x: with_codes(x, _replace_code(9, 1)))),
    ("0.5 decoded as 0", "subnormal of E2M1", on_weights(lambda x: with_codes(x, _half_as_zero))),
    ("nibbles swapped", "packing", on_weights(lambda x: with_codes(x, _swap_nibbles))),
    ("weight rows 8 apart exchanged", "shuffle", on_weights(lambda x: x.rows(torch.arange(x.codes.shape[0]) ^ 8))),
    ("two output rows swapped", "store", on_output(_swap_rows)),
    ("neighbouring output columns swapped", "interleave", on_output(_swap_columns)),
    *(
        (f"alpha x {factor}", _TABLE, on_weights(lambda x, factor=factor: scaled(x, factor)))
        for factor in (0.1, 0.55, 1.01, 1.5, 2.0, 5.0)
    ),
    ("global scale rounded to bf16", "SGLang's Marlin preparation", on_weights(_round_scale_to_bf16)),
    ("activation global scale missing", "loader", on_activations(lambda x: scaled(x, 1 / x.global_scale.item()))),
    ("global scale inverted", "encode and decode scale confused", on_weights(lambda x: scaled(x, x.global_scale.item() ** -2))),
    ("bf16 accumulation", _TABLE, instead(reference.gemm_in(Order("blocked", 64, torch.bfloat16)))),
    ("fp16 accumulation", "published tolerance lets it through", instead(reference.gemm_in(Order("blocked", 64, torch.float16)))),
    ("14-bit accumulation", "Hopper's FP8 tensor core", instead(narrow_accumulator(14))),
    ("split-K reduced in bf16", "workspace type", instead(reference.gemm_in(Order("split_k", 4, torch.bfloat16)))),
    ("output truncated", "wrong rounding mode", rounded_by(truncate_to_bf16)),
    ("ties rounded away from zero", "wrong rounding mode", rounded_by(ties_away)),
    ("output rounded twice", "intermediate type", rounded_by(round_twice)),
    ("Marlin's bf16 subnormals", "SGLang's Marlin on an H200", instead(reference_marlin.gemm)),
    ("writes nothing", "FlashInfer's nvfp4_quantize on SM90: an empty body", instead(lambda problem, out: out)),
    ("one value off by one ulp", "published tolerance lets it through", on_output(one_ulp)),
    ("all values off by one ulp", "published tolerance lets it through", on_output(all_one_ulp)),
    (
        "rows past 128 zero unless M is a multiple of 128",
        "flashinfer #3398",
        _tail_rows(0.0, lambda m: m > 128 and m % 128 != 0, lambda m: m - m % 128),
    ),
    ("wrong for M = 1 only", "GEMV path", _single_row_path),
    ("wrong for 32 < M <= 64 only", "flashinfer #3192: tactic of another bucket", _one_bad_bucket),
    (
        "tail rows not written",
        "flashinfer #4569: incomplete write",
        _tail_rows(math.nan, lambda m: m % 8 != 0, lambda m: m - m % 8),
    ),
    ("writes past its last row", "store without mask", _writes_past_end),
    ("adds to the output instead of overwriting", "beta = 1", _adds_to_output),
    ("stale output", "workspace keyed by shape", _stale),
    ("race in one tile, one call in 5", "flashinfer #2708", _race(5)),
)

GEMM_FAULTS: tuple[Fault, ...] = (
    *(Fault(name, "gemm", source, inject) for name, source, inject in _GEMM),
    Fault(
        "race in one tile, one call in 100,000",
        "gemm",
        "flashinfer #2708 under low load",
        _race(100_000),
        "a finite number of calls cannot see it; it needs load (stage 3), and n clean calls only bound its rate by 3 / n",
    ),
    Fault(
        "another order of addition",
        "gemm",
        "stream-K, atomics",
        instead(reference.gemm_in(Order("blocked", 48))),
        "it is legitimate: fp32 addition in any order is what the format's users agreed to",
    ),
)
