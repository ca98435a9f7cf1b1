"""What NVFP4 costs real weights: the error of every linear layer of SmolLM2, quantised and dequantised."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

import torch

from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.conventions import BLOCK_SIZE, MODELOPT, Convention
from nvfp4lab.records import Evidence, Number, Verdict
from nvfp4lab.stack import capture, here


@dataclasses.dataclass(frozen=True)
class LayerError:
    """Error of one weight. layer: its number in the model; kind: "attn_q", "ffn_down", ...

    relative_rms: RMS of (dequantised - weight) over RMS of the weight. worst_block: the largest relative RMS of any
    block of 16 that is not all zero. zeros: fraction of weights that become zero.
    """

    layer: int
    kind: str
    relative_rms: float
    worst_block: float
    zeros: float


def layer_error(name: str, weight: torch.Tensor, convention: Convention = MODELOPT) -> LayerError:
    """Error of `weight` float32 [N, K] under its own global scale. `name` is a GGUF one: "blk.LAYER.KIND"."""
    _, layer, kind = name.split(".")
    quantised = codec.quantize(weight, convention=convention)
    value = codec.dequantize(quantised, torch.float32)
    zeros = 1 - value.count_nonzero().item() / value.numel()
    energy, lost = (part.view(-1, BLOCK_SIZE).square_().sum(-1) for part in (weight.clone(), value.sub_(weight)))
    return LayerError(
        layer=int(layer),
        kind=kind,
        relative_rms=(lost.sum() / energy.sum()).sqrt().item(),
        worst_block=(lost / energy)[energy > 0].max().sqrt().item(),
        zeros=zeros,
    )


def layer_errors(weights: Iterable[tuple[str, torch.Tensor]], convention: Convention = MODELOPT) -> list[LayerError]:
    """`layer_error` of each (name, weight)."""
    return [layer_error(name, weight, convention) for name, weight in weights]


def to_evidence(errors: Sequence[LayerError], model: str, repro: str) -> list[Evidence]:
    """One Evidence per kind of layer. An error is a property of the format, so the verdict is ok."""
    records = []
    for kind in dict.fromkeys(error.kind for error in errors):
        of_kind = [error for error in errors if error.kind == kind]
        relative = [error.relative_rms for error in of_kind]
        records.append(
            Evidence(
                stage="checkpoint",
                subject=f"codec:error:{model}:{kind}",
                target=here(),
                stack=capture(),
                verdict=Verdict.OK,
                repro=repro,
                numbers=(
                    Number("relative_rms", statistics.mean(relative), "fraction", min(relative), max(relative), len(relative)),
                    Number("worst_block", max(error.worst_block for error in of_kind), "fraction", n=len(relative)),
                ),
                details={"low_high": "smallest and largest layer, no confidence interval"},
            )
        )
    return records


def summary(errors: Sequence[LayerError]) -> str:
    """One line: the typical error, its range over layers, and how many weights vanish."""
    relative = [100 * error.relative_rms for error in errors]
    vanish = 100 * statistics.mean(error.zeros for error in errors)
    return (
        f"The error of {len(errors)} weight matrices is {statistics.median(relative):.1f} % of their RMS "
        f"({min(relative):.1f} to {max(relative):.1f} %); {vanish:.0f} % of weights become zero."
    )
