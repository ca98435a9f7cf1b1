"""Pictures of the number format: the sixteen values, one block, the scales, error by layer, who agrees with whom."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nvfp4lab.nvfp4 import codec
from nvfp4lab.nvfp4.consensus import INPUTS, Answer
from nvfp4lab.nvfp4.conventions import BLOCK_SIZE, E2M1_MIDPOINTS, E4M3_MAX, E4M3_MIN_NORMAL, E4M3_MIN_SUBNORMAL
from nvfp4lab.nvfp4.error import LayerError
from nvfp4lab.report.style import SERIES_COLOURS, figure

BLUE, ORANGE, GREEN, GREY = *SERIES_COLOURS[:3], "#999999"
GROUP_COLOURS = ("#E8E8E8", "#56B4E9", "#E69F00", "#CC79A7", "#009E73")  # by group letter: A is the one compared with


def sixteen_values() -> Figure:
    """The number line of E2M1, each value with its code, ties marked between neighbours."""
    fig = figure(8.5, 1.9)
    axes = fig.subplots()
    values = codec.e2m1_values()
    axes.axhline(0, color=GREY, linewidth=0.8, zorder=0)
    for code, value in enumerate(values.tolist()):
        if code != 8:  # -0 stands on +0
            axes.plot(value, 0, "o", color=BLUE, markersize=9)
            axes.annotate(f"{value:g}", (value, 0), (0, 9), textcoords="offset points", ha="center", fontsize=9)
            label = "0000\n1000" if code == 0 else f"{code:04b}"
            axes.annotate(
                label, (value, 0), (0, -9), textcoords="offset points", ha="center", va="top", fontsize=6.5, family="monospace"
            )
    ties = torch.tensor(E2M1_MIDPOINTS)
    axes.plot(torch.cat((-ties, ties)), torch.zeros(14), "|", color=ORANGE, markersize=14, label="tie: halfway between two values")
    axes.set(
        xlim=(-6.5, 6.5),
        ylim=(-1, 1),
        yticks=[],
        xticks=[],
        title="E2M1: the sixteen codes (sign, two exponent bits, one mantissa bit)",
    )
    axes.legend(loc="lower right", fontsize=7.5, frameon=False)
    axes.spines[:].set_visible(False)
    return fig


def one_block(weight: torch.Tensor, row: int = 0, block: int = 0) -> Figure:
    """One block of a float32 weight [N, K]: its 16 values, what they become, and the grid that they had to land on."""
    fig = figure(8.5, 3.4)
    axes = fig.subplots()
    quantised = codec.quantize(weight)
    columns = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
    before, after = weight[row, columns], codec.dequantize(quantised, torch.float32)[row, columns]
    s, g = quantised.block_scale[row, block].item(), quantised.global_scale.item()
    for value in (codec.e2m1_values() * s * g).tolist():
        axes.axhline(value, color="#DDDDDD", linewidth=0.8, zorder=0)
    places = torch.arange(BLOCK_SIZE)
    axes.vlines(places, before, after, color=ORANGE, linewidth=2.5, label="error")
    axes.plot(places, before, "o", color=BLUE, markersize=6, label="weight")
    axes.plot(places, after, "s", color=GREEN, markersize=7, markerfacecolor="none", markeredgewidth=1.6, label="NVFP4")
    codes = codec.unpack(quantised.codes)[row, columns].tolist()
    axes.set_xticks(places, [f"{code:04b}" for code in codes], fontsize=7, family="monospace")
    axes.set(xlabel="code", ylabel="weight", title=f"One block: 16 codes x block scale {s:g} (E4M3) x global scale {g:.3g} (fp32)")
    axes.legend(fontsize=8, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return fig


def block_scales(weight: torch.Tensor) -> Figure:
    """Where the block scales of a weight lie in E4M3's range, and what they would be without a global scale."""
    fig = figure(8.5, 2.8)
    axes = fig.subplots()
    quantised = codec.quantize(weight)
    used = quantised.block_scale.float().log2().flatten()
    bare = (weight.view(-1, BLOCK_SIZE).abs().amax(-1) / 6).log2()
    edges = torch.arange(-16, 9.25, 0.25)
    axes.hist(bare[bare.isfinite()], bins=edges, color=GREY, alpha=0.8, label="amax / 6: no global scale")
    axes.hist(used, bins=edges, color=BLUE, alpha=0.8, label="block scale as stored")
    lowest, normal, highest = (torch.tensor(v).log2().item() for v in (E4M3_MIN_SUBNORMAL, E4M3_MIN_NORMAL, E4M3_MAX))
    axes.axvspan(normal, highest, color=GREEN, alpha=0.10, label="E4M3 with 4 significant bits")
    axes.axvspan(lowest, normal, color=ORANGE, alpha=0.18, label="E4M3 subnormals: 3 to 1 bits")
    axes.set(
        xlabel="log2 of the scale",
        ylabel="blocks",
        title="The global scale puts the largest block at 448",
    )
    axes.legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    return fig


def error_by_layer(errors: Sequence[LayerError]) -> Figure:
    """Relative RMS error in percent, one line per kind of layer over the depth of the model."""
    fig = figure(8.5, 3.2)
    axes = fig.subplots()
    for index, kind in enumerate(sorted({error.kind for error in errors})):
        of_kind = sorted((error for error in errors if error.kind == kind), key=lambda error: error.layer)
        axes.plot(
            [error.layer for error in of_kind],
            [100 * error.relative_rms for error in of_kind],
            marker="os^vDPX"[index % 7],
            markersize=4,
            linewidth=1.2,
            color=SERIES_COLOURS[index % len(SERIES_COLOURS)],
            label=kind,
        )
    axes.set(
        xlabel="layer",
        ylabel="RMS error / RMS weight, %",
        title="SmolLM2-135M: what NVFP4 costs each weight matrix (mind the narrow axis)",
    )
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    axes.spines[["top", "right"]].set_visible(False)
    return fig


def consensus_table(answers: Sequence[Answer]) -> Figure:
    """Inputs by codecs: the same letter in a row is the same bits; the number is the share of codes unlike the first codec's."""
    inputs, codecs = (list(dict.fromkeys(getattr(answer, field) for answer in answers)) for field in ("input", "convention"))
    fig = figure(9.5, 0.42 * len(inputs) + 1.0)
    axes = fig.subplots()
    for answer in answers:
        x, y = codecs.index(answer.convention), inputs.index(answer.input)
        colour = GROUP_COLOURS[ord(answer.group) - ord("A")]
        axes.add_patch(_cell(x, y, colour))
        text = answer.group if answer.group == "A" else f"{answer.group}   {_share(answer)}"
        axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", fontsize=8.5)
    for y, name in enumerate(inputs):
        axes.text(len(codecs) + 0.08, y + 0.5, INPUTS[name].shows, va="center", fontsize=8, color="#555555")
    axes.set(
        xlim=(0, len(codecs) + 2.1),
        ylim=(len(inputs), 0),
        title="Who gives the same bits for the same input and global scale (bf16)",
    )
    axes.set_xticks([x + 0.5 for x in range(len(codecs))], codecs, fontsize=9)
    axes.set_yticks([y + 0.5 for y in range(len(inputs))], inputs, fontsize=9)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False)
    axes.spines[:].set_visible(False)
    return fig


def _cell(x: int, y: int, colour: str) -> Rectangle:
    return Rectangle((x + 0.02, y + 0.04), 0.96, 0.92, facecolor=colour, edgecolor="none")


def _share(answer: Answer) -> str:
    """The share of codes that differ, or of block scales where all codes agree."""
    share, what = (answer.codes_differ, "codes") if answer.codes_differ else (answer.scales_differ, "scales")
    return f"{100 * share:.2g} % of {what}"
