"""Gates: the right verdict, kind and place, and no conclusion from an expectation that is itself broken."""

import math

import pytest
import torch

from nvfp4lab.kernels import gates
from nvfp4lab.kernels.gates import Tolerance
from nvfp4lab.kernels.operands import ProbeError
from nvfp4lab.records import Verdict, WrongKind


def expected(rows: int = 200, columns: int = 40) -> torch.Tensor:
    return torch.randint(-128, 128, (rows, columns), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)


def tolerance(reference: torch.Tensor, relative: float = 2.0**-8, gain: float = 1e-4) -> Tolerance:
    return Tolerance(reference.abs() * relative + 1e-30, gain, "half an ulp")


def test_exact_names_the_first_bad_row_column_tile_and_expert():
    right = expected()
    wrong = right.clone()
    wrong[130, 17] += 1
    wrong[150, 3] += 1
    result = gates.exact(wrong, right, experts=torch.arange(200) % 8)
    assert (result.verdict, result.kind) == (Verdict.WRONG, WrongKind.INEXACT)
    assert (result.place.row, result.place.col, result.place.tile) == (130, 17, (1, 1))
    assert (result.place.bad_values, result.place.bad_rows, result.place.expert) == (2, 2, 130 % 8)
    assert "row 130" in result.reason and "expert 2" in result.reason


def test_exact_takes_minus_zero_for_zero():
    zeros = torch.zeros(3, 4, dtype=torch.bfloat16)
    assert gates.exact(-zeros, zeros).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("edit", "kind"),
    [
        (lambda x: x.index_fill(0, torch.tensor([3]), math.nan), WrongKind.NAN),
        (lambda x: x.index_fill(0, torch.tensor([3]), math.inf), WrongKind.NAN),
        (lambda x: x * 2, WrongKind.GARBAGE),
        (lambda x: x * 1.0625, WrongKind.DEGRADED),
        (lambda x: x.flip(0), WrongKind.GARBAGE),
    ],
)
def test_exact_tells_the_kinds_apart(edit, kind):
    assert gates.exact(edit(expected()), expected()).kind is kind


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_broken_expectation_is_an_error_of_the_probe(value):
    broken = expected().index_fill(0, torch.tensor([0]), value)
    with pytest.raises(ProbeError, match="expected value"):
        gates.exact(broken, broken)
    with pytest.raises(ProbeError, match="expected value"):
        gates.within(broken, broken.double(), tolerance(expected().double()))
    with pytest.raises(ProbeError, match="finite"):
        gates.within(expected(), expected().double(), Tolerance(broken.double(), 1.0, ""))


def test_the_right_values_in_another_dtype_are_not_the_output_that_was_asked_for():
    result = gates.exact(expected().float(), expected())
    assert result.verdict is Verdict.WRONG and "dtype torch.float32, expected torch.bfloat16" in result.reason


def test_another_shape_is_garbage_not_an_exception():
    result = gates.exact(expected()[:-1], expected())
    assert result.kind is WrongKind.GARBAGE and "(199, 40)" in result.reason


def test_within_accepts_rounding_and_refuses_more():
    reference = torch.randn(200, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    rounded = reference.bfloat16()
    assert gates.within(rounded, reference, tolerance(reference)).verdict is Verdict.OK
    wrong = rounded.clone()
    wrong[7, 9] *= 1.02
    result = gates.within(wrong, reference, tolerance(reference))
    assert result.verdict is Verdict.WRONG and (result.place.row, result.place.col) == (7, 9) and result.worst > 1


def test_a_gain_inside_every_bound_is_still_wrong():
    reference = torch.randn(400, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    scaled = (reference * 1.003).float()
    result = gates.within(scaled, reference, tolerance(reference))
    assert result.verdict is Verdict.WRONG and result.place is None and "gain 1.003" in result.reason


def test_within_refuses_nan():
    reference = expected().double()
    output = expected()
    output[5, 5] = math.nan
    result = gates.within(output, reference, tolerance(reference))
    assert (result.kind, result.place.row) == (WrongKind.NAN, 5)
