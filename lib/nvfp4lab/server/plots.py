"""Pictures of stage 3. Each takes records and returns a Figure; none computes a result."""

import itertools
import textwrap
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.transforms import offset_copy

from nvfp4lab.records import Evidence
from nvfp4lab.report.style import SERIES_COLOURS, VERDICT_COLOURS, LabFigure, figure

STATE_COLOURS = {
    "importing": "#C6DBEF",
    "loading": "#6BAED6",
    "compiling": "#E69F00",
    "capturing": "#9E9AC8",
    "warming": "#2171B5",
}
BAR = 0.5  # height of a bar; a row without a reason is 0.84 high
REASON_LETTERS, REASON_LINES = 110, 3  # what fits beside the longest arm name


def starts(rows: Sequence[Evidence]) -> LabFigure:
    """One bar per arm: what its start spent its time on, and the verdict at its end, the reason below it.

    rows: evidence of stage "server"; the timeline is in `details`. Arms that were not started have a verdict only.
    """
    names = [row.subject.removeprefix("arm:") for row in rows]
    alt = "; ".join(f"{name}: {row.verdict}" for name, row in zip(names, rows, strict=True))
    told = [textwrap.wrap(row.reason, REASON_LETTERS, max_lines=REASON_LINES, placeholder=" …") for row in rows]
    made = figure(
        8.5, 1.2 + 0.42 * len(rows) + 0.12 * sum(map(len, told)), alt=f"Time to ready by phase and verdict of each arm. {alt}."
    )
    axes = made.subplots()
    places = _places(told)
    ends = [_bar(axes, y, row) for y, row in zip(places, rows, strict=True)]
    for y, end, row, reason in zip(places, ends, rows, told, strict=True):
        _verdict(axes, y, end, row)
        below = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "top", "fontsize": 7}
        axes.annotate("\n".join(reason), (0, y + BAR / 2), (2, -1), color="#444444", **below).set_in_layout(False)
    axes.set_yticks(places, names)
    axes.set_ylim(max(_places([*told, []])[-1], 1.0) - BAR, -BAR)
    axes.set_xlim(0, 1.25 * max([*ends, 1.0]))
    at_once = 1 + max((len(row.details.get("side_by_side", ())) for row in rows), default=0)
    axes.set_xlabel("seconds after the start" + (f", {at_once} servers started at once" if at_once > 1 else ""))
    _legend_of_states(made, axes, rows)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return made


def _places(told: Sequence[Sequence[str]]) -> list[float]:
    """Where each bar stands: below the reason of the one above it."""
    return [0.0, *itertools.accumulate(0.84 + 0.24 * len(reason) for reason in told)][: len(told)]


def _verdict(axes: Axes, y: float, end: float, row: Evidence) -> None:
    """A square in the verdict's colour beyond the bar's end, and the word beside it: distances in points, whatever the scale."""
    marker = {"marker": "s", "markersize": 8, "markeredgecolor": "#444444", "color": VERDICT_COLOURS[row.verdict]}
    shifted = offset_copy(axes.transData, fig=axes.figure, x=8, units="points")
    axes.plot(end, y, linestyle="", transform=shifted, clip_on=False, **marker)
    word = f"{row.verdict}{f' ({row.kind})' if row.kind else ''}"
    axes.annotate(word, (end, y), (17, 0), textcoords="offset points", va="center", fontsize=9)


def _legend_of_states(made: LabFigure, axes: Axes, rows: Sequence[Evidence]) -> None:
    seen = {state for row in rows for state, _ in row.details.get("timeline", ())}
    handles = [Patch(color=colour, label=state) for state, colour in STATE_COLOURS.items() if state in seen]
    if handles:
        made.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8)


def _bar(axes: Axes, y: float, row: Evidence) -> float:
    """Draw the phases of one start; where the bar ends, in seconds."""
    timeline = row.details.get("timeline", ())
    for (state, began_s), (_, ended_s) in itertools.pairwise(timeline):
        if state in STATE_COLOURS:
            axes.barh(y, ended_s - began_s, left=began_s, color=STATE_COLOURS[state], height=BAR)
    final = [began_s for state, began_s in timeline if state in ("ready", "failed", "hung")]
    return final[0] if final else 0.0


def token_kl(distances: Mapping[str, Sequence[float]], perfect: Mapping[str, Sequence[float]], reference: str) -> LabFigure:
    """Token-level KL of each arm from the reference: the share of tokens above each value.

    distances: arm -> one value in nats per scored token. perfect: arm -> the same for perfect kernels on its weights, drawn
    dashed in the arm's colour; an arm whose line lies on its dashed one loses nothing that its number format does not cost.
    """
    means = "; ".join(f"{name}: mean {_mean(values):.3g} nats" for name, values in distances.items() if values)
    made = figure(8.5, 3.6, alt=f"Share of tokens whose KL divergence from {reference} exceeds a value, by arm. {means}.")
    axes = made.subplots()
    for index, (name, values) in enumerate(distances.items()):
        colour, own = SERIES_COLOURS[index % len(SERIES_COLOURS)], "-" if index < len(SERIES_COLOURS) else "-."
        for drawn, style in ((values, own), (perfect.get(name, ()), "--")):
            if drawn:
                ordered = sorted(max(value, 1e-6) for value in drawn)
                label = f"{name}: mean {_mean(drawn):.3g} nats over {len(drawn)} tokens" if style == own else None
                shares = [1 - index / len(ordered) for index in range(len(ordered))]
                axes.step(ordered, shares, where="post", color=colour, linestyle=style, label=label)
    if any(perfect.values()):
        axes.plot([], [], "k--", label="perfect kernels on the same weights")
    axes.set_xscale("log")
    axes.set_xlabel(f"KL({reference} || arm) per token, nats")
    axes.set_ylabel("share of tokens above")
    axes.set_ylim(0, 1.02)
    if distances:
        made.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=8)
    return made


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
