"""Where NVFP4 codecs disagree: named inputs, each made to show one choice, and a table of who gives what on them."""

import dataclasses
import string
from collections.abc import Callable, Sequence

import torch

from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.conventions import BLOCK_SIZE, CONVENTIONS, E2M1_MIDPOINTS, Convention
from nvfp4lab.records import Evidence, Number, Verdict
from nvfp4lab.stack import capture, here

_G = 1.0 / 448  # a block whose largest magnitude is 6 then has scale 448; 1 / 448 is no fp32 number, so products round
_OF_NORMAL = 4.25 / 2688  # as a tensor whose largest magnitude is the bf16 number 4.25 has it


@dataclasses.dataclass(frozen=True)
class Input:
    """One input for every codec. values: float32 [rows, 16 n]; global_scale: what all codecs are given."""

    name: str
    shows: str
    values: Callable[[], torch.Tensor]
    global_scale: float = _G
    finite: bool = True

    def make(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """(x in `dtype`, 0-dim float32 global scale)."""
        return self.values().to(dtype), torch.tensor(self.global_scale, dtype=torch.float32)


def _normal(rows: int = 64, columns: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def _ties() -> torch.Tensor:
    """Every midpoint of both signs and its fp32 neighbours, in blocks whose largest magnitude is 6."""
    exact = torch.tensor(E2M1_MIDPOINTS)
    rows = [sign * value for value in (exact, exact.nextafter(exact * 0), exact.nextafter(exact * 9)) for sign in (1, -1)]
    tail = torch.tensor([6.0, -6.0, 0.0])
    return torch.stack([torch.cat((row, row.flip(0)[:6], tail)) for row in rows])


def _scaled_ties() -> torch.Tensor:
    """The midpoints in blocks of many sizes: x / s, x * (1 / s) and their rounding errors decide the code."""
    amax = torch.linspace(1.0, 6.0, 64).view(-1, 1)
    return _ties()[:1] * (amax / 6.0)


def _scale_ties() -> torch.Tensor:
    """Blocks whose scale lies halfway between two E4M3 numbers in real arithmetic, and one fp32 step to either side."""
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    amax = (6 * float(torch.tensor(_G)) * (scales[1:] + scales[:-1]) / 2).float()
    near = torch.cat((amax, amax.nextafter(amax * 0), amax.nextafter(amax * 9)))
    return near.view(-1, 1) * torch.tensor([1.0, -0.5] + [0.3, -0.07] * 7)


def _with(index: tuple[int, ...], value: float) -> torch.Tensor:
    x = _normal(4, 64, seed=1)
    x[index] = value
    return x


def _small_blocks() -> torch.Tensor:
    """Blocks scaled by 2^0 .. 2^-40: block scales through E4M3's subnormals down to nothing."""
    return _normal(41, BLOCK_SIZE, seed=2) * torch.exp2(-torch.arange(41.0)).view(-1, 1)


def _zeros() -> torch.Tensor:
    x = _normal(4, 64, seed=4)
    x[0, :16], x[1, 16:32] = 0.0, -0.0
    return x


INPUTS: dict[str, Input] = {
    entry.name: entry
    for entry in (
        Input("normal", "everyday values", lambda: _normal(256, 1024), _OF_NORMAL),
        Input("exact ties", "where 0.25, 0.75, ... 5 go when no product rounds", _ties, 2.0**-6),
        Input("ties", "the same with a global scale that rounds", _ties),
        Input("scaled ties", "divide or multiply by a reciprocal", _scaled_ties),
        Input("scale ties", "a block scale halfway between two E4M3 numbers", _scale_ties),
        Input("zero blocks", "scale of an all-zero block", _zeros),
        Input("minus zero", "sign of -0.0", lambda: _with((slice(None), slice(0, 64, 2)), -0.0)),
        Input(
            "small negatives",
            "sign of a value that rounds to zero",
            lambda: -_normal().abs() * torch.tensor([1.0] + [1e-3] * 15).repeat(16),
        ),
        Input("small blocks", "smallest block scale", _small_blocks),
        Input("huge outlier", "a block scale above 448", lambda: _with((1, 5), 3e4)),
        # A global scale below 1.9e-37 would overflow torchao's (1 / g) / s, and 0 * Inf leaves the sign of a NaN to the CPU.
        Input("subnormals", "values below 2^-126", lambda: _normal() * 1e-38, 2e-37),
        Input("infinity", "Inf in one block", lambda: _with((2, 7), float("inf")), finite=False),
        Input("NaN", "NaN in one block", lambda: _with((2, 7), float("nan")), finite=False),
    )
}


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one convention makes of one input.

    group: "A" for the first convention's bits, the same letter for all that give the same bits, "B" for the next...
    codes_differ, scales_differ: fractions of elements and of blocks that differ from the first convention's bits.
    """

    input: str
    convention: str
    group: str
    codes_differ: float
    scales_differ: float


def consensus(conventions: Sequence[Convention] = tuple(CONVENTIONS.values()), dtype: torch.dtype = torch.bfloat16) -> list[Answer]:
    """One Answer per input and convention, in the order of INPUTS; the first convention is the one compared with.

    All get the same 1 / E as their global scale, so what differs is block scale and codes alone.
    """
    answers = []
    for entry in INPUTS.values():
        x, g = entry.make(dtype)
        groups: dict[bytes, str] = {}
        results = [codec.quantize(x, encode_scale=1.0 / g, convention=convention) for convention in conventions]
        for convention, result in zip(conventions, results, strict=True):
            codes, scales = codec.unpack(result.codes), result.block_scale.view(torch.uint8)
            group = groups.setdefault(codes.numpy().tobytes() + scales.numpy().tobytes(), string.ascii_uppercase[len(groups)])
            first = results[0]
            codes_differ = (codes != codec.unpack(first.codes)).float().mean().item()
            scales_differ = (scales != first.block_scale.view(torch.uint8)).float().mean().item()
            answers.append(Answer(entry.name, convention.name, group, codes_differ, scales_differ))
    return answers


def summary(answers: Sequence[Answer]) -> str:
    """One line: on how many inputs all agree, and how far apart they are on everyday values."""
    groups = {name: {answer.group for answer in answers if answer.input == name} for name in INPUTS}
    agreed = [name for name, letters in groups.items() if letters == {"A"}]
    everyday = [100 * answer.codes_differ for answer in answers if answer.input == "normal" and answer.group != "A"]
    apart = f"{min(everyday):.2f} to {max(everyday):.2f} % of codes" if everyday else "no code"
    return f"Codecs agree to the bit on {len(agreed)} of {len(groups)} kinds of input; on everyday values they differ in {apart}."


def to_evidence(answers: Sequence[Answer], repro: str) -> list[Evidence]:
    """One Evidence per input: who agrees with whom. Disagreement of conventions is no fault, so the verdict is ok."""
    records = []
    for name in dict.fromkeys(answer.input for answer in answers):
        row = [answer for answer in answers if answer.input == name]
        records.append(
            Evidence(
                stage="lab",
                subject=f"codec:consensus:{name}",
                target=here(),
                stack=capture(),
                verdict=Verdict.OK,
                repro=repro,
                reason=INPUTS[name].shows,
                numbers=tuple(Number(f"codes_differ_{answer.convention}", answer.codes_differ, "fraction") for answer in row),
                details={"groups": {answer.convention: answer.group for answer in row}},
            )
        )
    return records


def choices(conventions: Sequence[Convention] = tuple(CONVENTIONS.values())) -> list[tuple[str, ...]]:
    """What each convention chose: one row per field on which they differ, (question, answer, answer, ...)."""
    names = [field.name for field in dataclasses.fields(Convention) if field.name not in ("name", "source")]
    rows = [(name.replace("_", " "), *(str(getattr(convention, name)) for convention in conventions)) for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def tie_values(conventions: Sequence[Convention] = tuple(CONVENTIONS.values())) -> list[tuple[float, ...]]:
    """(midpoint, E2M1 value that each convention gives it, ...) in a block whose largest magnitude is 6, g = 1 / 448.

    In real numbers every midpoint is a tie there. In fp32 s * g and 1 / (s * g) round, and the tie is decided before
    anyone rounds to even.
    """
    x = torch.tensor([[*E2M1_MIDPOINTS, 6.0] + [0.0] * 8])
    columns = []
    for convention in conventions:
        codes = codec.unpack(codec.quantize(x, encode_scale=1.0 / torch.tensor(_G), convention=convention).codes)
        columns.append(codec.e2m1_values()[codes[0, : len(E2M1_MIDPOINTS)].long()].tolist())
    return list(zip(E2M1_MIDPOINTS, *columns, strict=True))
