"""Gates: from a kernel's output to a verdict with kind and place. Two of them, and never a guessed tolerance.

`exact` is for probes whose result is unique: every bit counts. `within` is for realistic inputs: a bound per element, derived
from the arithmetic by whoever made the expectation, and apart from it a bound on the least-squares gain, because a
kernel that is 1 % off everywhere can stay inside every element's bound.
"""

import dataclasses
import math

import torch

from nvfp4lab.kernels.operands import ProbeError
from nvfp4lab.records import Verdict, WrongKind

TILE = (128, 16)  # rows and columns of the place that is reported: one tile of the 128x4 scale layout is 128 rows high

# Relative Frobenius error that separates the kinds. Rounding a right result to bf16 costs about 2^-9.3; FP4 rounding of the
# operands, which a model tolerates by design, about 0.1.
INEXACT_BELOW = 2.0**-7
DEGRADED_BELOW = 0.25


@dataclasses.dataclass(frozen=True)
class Place:
    """Where the first bad value is. tile: (row, column) index in tiles of 128x16; expert: of that token, if it is an MoE."""

    row: int
    col: int
    tile: tuple[int, int]
    bad_values: int
    bad_rows: int
    expert: int | None = None


@dataclasses.dataclass(frozen=True)
class GateResult:
    """The verdict of one gate.

    gain: least-squares factor of the output over the expectation, None where the expectation is zero or the output not finite.
    note: what an OK still leaves to say, such as the convention that was followed.
    worst: largest error in units of what was allowed (0 for a bit-equal result, infinite for NaN).
    """

    verdict: Verdict
    reason: str = ""
    kind: WrongKind | None = None
    place: Place | None = None
    gain: float | None = None
    worst: float = 0.0
    compared: int = 0
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """A derived bound. values: float64 like the expectation, per element; gain: on |gain - 1|; because: the derivation in words."""

    values: torch.Tensor
    gain: float
    because: str


def exact(actual: torch.Tensor, expected: torch.Tensor, experts: torch.Tensor | None = None) -> GateResult:
    """Bit-for-bit, except that -0 equals 0 (the sign of a zero sum is a matter of rounding mode, not of correctness).

    expected: in the dtype that the output must have; the right values in a wider one are another kernel's.
    experts: int [rows], the first expert of each token, to name it in the place. Raises ProbeError on a NaN expectation.
    """
    _check_expectation(expected)
    if misfit := _misfit(actual, expected, dtype=expected.dtype):
        return misfit
    bad = actual != expected
    if not bad.any():
        return GateResult(Verdict.OK, compared=expected.numel(), gain=_gain(actual, expected))
    return _wrong(actual, expected, bad, experts, f"differs from the only right result ({expected.dtype}, exact probe)")


def within(actual: torch.Tensor, expected: torch.Tensor, tolerance: Tolerance, experts: torch.Tensor | None = None) -> GateResult:
    """Each value within its own bound and the gain within its bound.

    expected: float64. Raises ProbeError on NaN in the expectation or in the tolerance.
    """
    _check_expectation(expected)
    if not torch.isfinite(tolerance.values).all() or not math.isfinite(tolerance.gain):
        raise ProbeError("a tolerance must be finite")
    if misfit := _misfit(actual, expected):
        return misfit
    error = (actual.double() - expected).abs()
    bad = ~(error <= tolerance.values)  # written so that NaN is bad
    if bad.any():
        worst = (error / tolerance.values.clamp_min(1e-300)).nan_to_num(math.inf).max().item()
        result = _wrong(actual, expected, bad, experts, f"outside the derived tolerance ({tolerance.because})")
        return dataclasses.replace(result, worst=worst)
    gain = _gain(actual, expected)
    worst = (error / tolerance.values.clamp_min(1e-300)).max().item() if error.numel() else 0.0
    if gain is not None and abs(gain - 1) > tolerance.gain:
        kind = _kind(actual, expected)
        reason = f"gain {gain:.6f}, allowed 1 +- {tolerance.gain:.1e}: every value is inside its bound, together they are scaled"
        return GateResult(Verdict.WRONG, reason, kind, gain=gain, worst=abs(gain - 1) / tolerance.gain, compared=expected.numel())
    return GateResult(Verdict.OK, gain=gain, worst=worst, compared=expected.numel())


def _check_expectation(expected: torch.Tensor) -> None:
    if not torch.isfinite(expected).all():
        raise ProbeError("the expected value holds NaN or Inf: nothing can be concluded about a kernel")


def _misfit(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype | None = None) -> GateResult | None:
    """What is wrong before any value is looked at; dtype None: any will do."""
    if actual.shape != expected.shape:
        reason = f"output has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    elif dtype not in (None, actual.dtype):
        reason = f"output has dtype {actual.dtype}, expected {dtype}"
    else:
        return None
    return GateResult(Verdict.WRONG, reason, WrongKind.GARBAGE, worst=math.inf)


def _wrong(actual, expected, bad, experts, why: str) -> GateResult:
    place = _place(bad, experts)
    got, wanted = actual[place.row, place.col].item(), expected[place.row, place.col].item()
    where = f"row {place.row}, column {place.col}" + (f", expert {place.expert}" if place.expert is not None else "")
    count = f"{place.bad_values} of {bad.numel()} values in {place.bad_rows} rows"
    reason = f"{count}; first at {where}: {got:g}, expected {wanted:g}; {why}"
    return GateResult(Verdict.WRONG, reason, _kind(actual, expected), place, _gain(actual, expected), math.inf, bad.numel())


def _place(bad: torch.Tensor, experts: torch.Tensor | None) -> Place:
    row, col = (int(index) for index in bad.nonzero()[0])
    expert = None if experts is None else int(experts[row])
    return Place(row, col, (row // TILE[0], col // TILE[1]), int(bad.sum()), int(bad.any(1).sum()), expert)


def _kind(actual: torch.Tensor, expected: torch.Tensor) -> WrongKind:
    if not torch.isfinite(actual).all():
        return WrongKind.NAN
    error = relative_error(actual, expected)
    return WrongKind.INEXACT if error < INEXACT_BELOW else WrongKind.DEGRADED if error < DEGRADED_BELOW else WrongKind.GARBAGE


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Frobenius norm of the error over that of the expectation; infinite where only the expectation is zero."""
    size = expected.double().norm().item()
    error = (actual.double() - expected.double()).norm().item()
    return error / size if size else (math.inf if error else 0.0)


def _gain(actual: torch.Tensor, expected: torch.Tensor) -> float | None:
    wanted = expected.double()
    power = (wanted * wanted).sum().item()
    gain = (actual.double() * wanted).sum().item() / power if power else math.nan
    return gain if math.isfinite(gain) else None
