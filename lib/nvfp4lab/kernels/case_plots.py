"""Pictures of kernel runs: backend x shape coloured by verdict, and how near each timed case comes to the roofline."""

from collections.abc import Sequence

import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nvfp4lab.kernels.case_report import backend_of, shape_of
from nvfp4lab.records import Evidence, Verdict
from nvfp4lab.report.style import SERIES_COLOURS, VERDICT_COLOURS, figure

# Of several cases with one shape the worst is shown: a kernel that is right once and wrong once is wrong.
_WORST_FIRST = (Verdict.WRONG, Verdict.CRASH, Verdict.HANG, Verdict.OOM, Verdict.UNSUPPORTED, Verdict.NOT_RUN, Verdict.OK)
_MOST_SHAPES = 60


def verdict_grid(rows: Sequence[Evidence]) -> Figure:
    """Backends down, shapes across; each cell is the worst verdict of the cases there. Blank: not asked."""
    shapes = list(dict.fromkeys(shape_of(row) for row in rows))[:_MOST_SHAPES]
    names = list(dict.fromkeys(backend_of(row) for row in rows))
    cells: dict[tuple[str, str], list[Verdict]] = {}
    for row in rows:
        cells.setdefault((backend_of(row), shape_of(row)), []).append(row.verdict)
    order = list(VERDICT_COLOURS)
    grid = [
        [
            order.index(min(cells[name, shape], key=_WORST_FIRST.index)) if (name, shape) in cells else float("nan")
            for shape in shapes
        ]
        for name in names
    ]
    fig = figure(max(6.0, 3.2 + 0.3 * len(shapes)), 2.2 + 0.24 * len(names))
    axes = fig.add_subplot()
    colours = ListedColormap([VERDICT_COLOURS[verdict] for verdict in order])
    axes.pcolormesh(grid, cmap=colours, vmin=-0.5, vmax=len(order) - 0.5, edgecolors="#DDDDDD", linewidth=0.6)
    axes.invert_yaxis()
    axes.set_yticks([index + 0.5 for index in range(len(names))], names, fontsize=7)
    axes.set_xticks([index + 0.5 for index in range(len(shapes))], shapes, rotation=60, ha="right", fontsize=6)
    axes.tick_params(length=0)
    seen = [verdict for verdict in order if any(row.verdict is verdict for row in rows)]
    handles = [Patch(facecolor=VERDICT_COLOURS[verdict], edgecolor="#999999", label=verdict.value) for verdict in seen]
    fig.legend(handles=handles, loc="outside upper center", ncol=len(seen), fontsize=7, frameon=False)
    return fig


def roofline(speeds: pd.DataFrame) -> Figure:
    """Achieved TFLOP/s over arithmetic intensity (FLOP per byte that must move), under the roof that this card showed in this run.

    Vertical bars: the 95 % interval of the time. The grey line joins what the roofline allows at each point's intensity.
    """
    fig = figure(7.5, 4.0)
    axes = fig.add_subplot()
    timed = speeds.dropna(subset=["roofline_fraction", "tflop_s", "gb_s"]) if len(speeds) else speeds
    if not len(timed):
        axes.text(0.5, 0.5, "no case was timed here", ha="center", va="center", transform=axes.transAxes)
        axes.set_axis_off()
        return fig
    intensity = 1e3 * timed["tflop_s"] / timed["gb_s"]
    roof = (timed["tflop_s"] / timed["roofline_fraction"]).groupby(intensity).max()
    axes.plot(roof.index, roof.values, color="#888888", linewidth=1.2, label="roofline, measured here")
    for colour, (name, group) in zip(SERIES_COLOURS * 9, timed.groupby("backend", sort=False), strict=False):
        rate = group["tflop_s"]
        spread = [rate - rate * group["median_ms"] / group["high_ms"], rate * group["median_ms"] / group["low_ms"] - rate]
        axes.errorbar(intensity[group.index], rate, spread, fmt="o", color=colour, capsize=3, markersize=4, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte that must move")
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize=7)
    return fig
