"""Pictures of kernel runs: backend x shape coloured by verdict, and how near each timed case comes to the roofline."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from nvfp4lab.kernels.case_report import backend_of, shape_of
from nvfp4lab.records import Evidence, Verdict
from nvfp4lab.report.style import SERIES_COLOURS, VERDICT_COLOURS, LabFigure, figure

# Of several cases with one shape the worst is shown: a kernel that is right once and wrong once is wrong.
_WORST_FIRST = (Verdict.WRONG, Verdict.CRASH, Verdict.HANG, Verdict.OOM, Verdict.UNSUPPORTED, Verdict.NOT_RUN, Verdict.OK)
_SHAPES_A_LINE = 20
_LABELS_IN = 1.0  # height of slanted shape labels
_BLACK_ON = (Verdict.UNSUPPORTED, Verdict.NOT_RUN, Verdict.OOM)
_LAUNCHES_INCLUDED = "cuda_events"


def verdict_grid(rows: Sequence[Evidence]) -> LabFigure:
    """Backends down, shapes across; each cell is the worst verdict of the cases there. Blank: not asked.

    A number: how many of a cell's cases were right, where there was more than one. Many shapes are wrapped like lines of text.
    """
    cells: dict[tuple[str, str], list[Verdict]] = {}
    for row in rows:
        cells.setdefault((backend_of(row), shape_of(row)), []).append(row.verdict)
    shapes = list(dict.fromkeys(shape for _, shape in cells))
    lines = [shapes[first : first + _SHAPES_A_LINE] for first in range(0, len(shapes), _SHAPES_A_LINE)]
    names = [list(dict.fromkeys(backend for backend, shape in cells if shape in line)) for line in lines]
    heights = [_LABELS_IN + 0.24 * len(own) for own in names]
    widest = max((len(line) for line in lines), default=1)
    fig = figure(max(6.0, 3.2 + 0.34 * widest), 0.6 + sum(heights), alt=_counted(rows))
    panels = fig.subplots(len(lines), squeeze=False, height_ratios=heights)[:, 0] if lines else ()
    for axes, line, own in zip(panels, lines, names, strict=True):
        _panel(axes, line, own, cells, widest)
    seen = [verdict for verdict in VERDICT_COLOURS if any(row.verdict is verdict for row in rows)]
    handles = [Patch(facecolor=VERDICT_COLOURS[verdict], edgecolor="#999999", label=verdict.value) for verdict in seen]
    fig.legend(handles=handles, loc="outside upper center", ncol=max(1, len(seen)), fontsize=7, frameon=False)
    return fig


def _panel(axes: Axes, shapes: Sequence[str], names: Sequence[str], cells: Mapping, widest: int) -> None:
    for (backend, shape), verdicts in cells.items():
        if shape in shapes:
            _cell(axes, shapes.index(shape), names.index(backend), verdicts)
    axes.set(xlim=(-0.5, widest - 0.5), ylim=(len(names) - 0.5, -0.5))
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xticks(range(len(shapes)), shapes, rotation=60, ha="right", rotation_mode="anchor", fontsize=6)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _cell(axes: Axes, x: int, y: int, verdicts: Sequence[Verdict]) -> None:
    worst = min(verdicts, key=_WORST_FIRST.index)
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=VERDICT_COLOURS[worst], edgecolor="white", linewidth=0.8))
    if len(verdicts) > 1:
        ink = "black" if worst in _BLACK_ON else "white"
        right = sum(verdict is Verdict.OK for verdict in verdicts)
        axes.text(x, y, f"{right}/{len(verdicts)}", ha="center", va="center", fontsize=6, color=ink)


def _counted(rows: Sequence[Evidence]) -> str:
    counts = Counter(row.verdict for row in rows)
    return "Backend by shape, coloured by verdict: " + ", ".join(f"{counts[one]} {one}" for one in Verdict if counts[one])


def roofline(speeds: pd.DataFrame) -> LabFigure:
    """Achieved TFLOP/s over arithmetic intensity (FLOP per byte that must move), under the roof that this card showed in this run.

    speeds: of `case_report.speeds`, at least one row. Vertical bars: the 95 % interval of the time. A hollow point has launch
    overhead in it. Without measured peaks the points stand without a roof.
    """
    fig = figure(7.5, 4.0, alt=_best(speeds))
    axes = fig.add_subplot()
    intensity = 1e3 * speeds["tflop_s"] / speeds["gb_s"]
    for style, (arithmetic, group) in zip(("-", "--", ":"), speeds.groupby("arithmetic", sort=False), strict=False):
        if (roof := _roof(group, intensity)) is not None:
            axes.plot(*roof, style, color="#888888", linewidth=1.2, label=f"roofline of {arithmetic}, measured here")
    several = speeds["method"].nunique() > 1
    for colour, ((name, method), group) in zip(SERIES_COLOURS * 9, speeds.groupby(["backend", "method"], sort=False), strict=False):
        rate = group["tflop_s"]
        spread = [rate - rate * group["median_ms"] / group["high_ms"], rate * group["median_ms"] / group["low_ms"] - rate]
        look = {"color": colour, "capsize": 3, "markersize": 4, "label": f"{name} ({method})" if several else name}
        inside = "white" if method == _LAUNCHES_INCLUDED else colour
        axes.errorbar(intensity[group.index], rate, spread, fmt="o", markerfacecolor=inside, **look)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte that must move")
    axes.set_ylabel("TFLOP/s")
    axes.legend(fontsize=7)
    return fig


def _roof(group: pd.DataFrame, intensity: pd.Series) -> tuple[list[float], list[float]] | None:
    """Slope, ridge and ceiling over these intensities, from the peaks that the fractions were taken of; None without peaks.

    A peak that bounds none of the cases is not known here, and not needed: the roof is drawn as far as the cases go.
    """
    fraction, bound = group["roofline_fraction"], group["bound"]
    slope = (group["gb_s"] / fraction / 1e3)[bound == "memory"].max()
    ceiling = (group["tflop_s"] / fraction)[bound == "compute"].max()
    if math.isnan(slope) and math.isnan(ceiling):
        return None
    ends = {intensity.min(), intensity.max()} | (set() if math.isnan(slope) or math.isnan(ceiling) else {ceiling / slope})
    return sorted(ends), [min(peak for peak in (slope * x, ceiling) if not math.isnan(peak)) for x in sorted(ends)]


def _best(speeds: pd.DataFrame) -> str:
    """What the picture says, in words: how near each backend comes at its best."""
    best = speeds.groupby("backend", sort=False)["roofline_fraction"].max().dropna()
    told = ", ".join(f"{name} {fraction:.2f}" for name, fraction in best.items())
    return f"Achieved TFLOP/s under the roofline; best fraction of it: {told}" if told else "Achieved TFLOP/s, peaks unknown"
