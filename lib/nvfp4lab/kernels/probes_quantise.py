"""Quantisers held to the codec code by code, and to a named convention: there is no single right answer to hold them to."""

import dataclasses

import torch

from nvfp4lab.kernels import gates
from nvfp4lab.kernels.gates import GateResult
from nvfp4lab.kernels.operands import ProbeError, QuantiseProblem
from nvfp4lab.kernels.poison import untouched_share
from nvfp4lab.kernels.probes_draw import Draw
from nvfp4lab.kernels.shapes import BLOCK, QuantiseShape
from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.conventions import CONVENTIONS, E2M1_MAX, E2M1_MIDPOINTS, E4M3_MAX
from nvfp4lab.records import Verdict

KINDS = ("normal", "outliers", "ties", "zeros", "tiny", "overflow", "signed zeros")  # row r holds inputs of kind r mod 7


@dataclasses.dataclass(frozen=True)
class QuantiseProbe:
    """expected: convention name -> bytes as the problem describes them."""

    problem: QuantiseProblem
    expected: dict[str, torch.Tensor]

    def check(self, actual: torch.Tensor) -> GateResult:
        """OK if the bytes are those of one named convention, which the note names; else how far each one is."""
        results = {name: gates.exact(actual, bytes_) for name, bytes_ in self.expected.items()}
        followed = [name for name, result in results.items() if result.verdict is Verdict.OK]
        if followed:
            return dataclasses.replace(results[followed[0]], note=f"follows the convention of {', '.join(followed)} to the bit")
        nearest = min(results, key=lambda name: results[name].place.bad_values if results[name].place else actual.numel())
        return dataclasses.replace(results[nearest], reason=self._story(actual, nearest, results[nearest]))

    def _story(self, actual: torch.Tensor, nearest: str, result: GateResult) -> str:
        if result.place is None:
            return result.reason
        if (share := untouched_share(actual)) > 0.5:
            return (
                f"the kernel wrote nothing, or little: {share:.0%} of its output still holds the poison of the memory it was given"
            )
        wrong = actual != self.expected[nearest]
        codes = self.problem.x.shape[1] // 2
        by_kind = {kind: int(wrong[index :: len(KINDS)].sum()) for index, kind in enumerate(KINDS)}
        where = ", ".join(f"{kind} {count}" for kind, count in by_kind.items() if count)
        split = f"{int(wrong[:, :codes].sum())} bytes of codes and {int(wrong[:, codes:].sum())} scales"
        return f"follows no named convention; nearest is {nearest}'s, from which {split} differ (rows of {where}); {result.reason}"


def quantise_codes(shape: QuantiseShape, seed: int, device: torch.device | str = "cpu") -> QuantiseProbe:
    """Rows of seven kinds under an encode scale that is no power of two. Raises ProbeError for K off a multiple of 16."""
    if shape.k % BLOCK or shape.m < 1:
        raise ProbeError(f"quantise probe: K must be a multiple of {BLOCK} and M positive, got {shape.label}")
    draw = Draw(seed, device)
    x = draw.normal((shape.m, shape.k))
    x[1 :: len(KINDS), ::37] *= 30
    ties = torch.tensor([*E2M1_MIDPOINTS, E2M1_MAX], device=draw.device).repeat(shape.k // 8)
    x[2 :: len(KINDS)] = ties * (1 - 2 * draw.integers(0, 2, (shape.k,)))
    x[3 :: len(KINDS)] = 0.0
    x[4 :: len(KINDS)] *= 1e-5
    x[5 :: len(KINDS)] *= 1e4
    x[6 :: len(KINDS), 1::2] = -0.0
    encode_scale = torch.tensor(E4M3_MAX * E2M1_MAX / 130.0, dtype=torch.float32, device=draw.device)
    problem = QuantiseProblem(x.bfloat16(), encode_scale)
    expected = {
        name: as_bytes(codec.quantize(problem.x, encode_scale=encode_scale, convention=c)) for name, c in CONVENTIONS.items()
    }
    return QuantiseProbe(problem, expected)


def as_bytes(tensor: codec.NVFP4Tensor) -> torch.Tensor:
    """Codes, then linear block scales, as uint8 [M, K/2 + K/16]."""
    return torch.cat([tensor.codes, tensor.block_scale.view(torch.uint8)], -1)
