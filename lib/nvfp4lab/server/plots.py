"""Pictures of stage 3. Each takes records and returns a Figure; none computes a result."""

import itertools
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from nvfp4lab.records import Evidence
from nvfp4lab.report.style import SERIES_COLOURS, VERDICT_COLOURS, LabFigure, figure

STATE_COLOURS = {
    "importing": "#C6DBEF",
    "loading": "#6BAED6",
    "compiling": "#E69F00",
    "capturing": "#9E9AC8",
    "warming": "#2171B5",
}


def starts(rows: Sequence[Evidence]) -> LabFigure:
    """One bar per arm: what its start spent its time on, and the verdict at its end, the reason below it.

    rows: evidence of stage "server"; the timeline is in `details`. Arms that were not started have a verdict only.
    """
    names = [row.subject.removeprefix("arm:") for row in rows]
    alt = "; ".join(f"{name}: {row.verdict}" for name, row in zip(names, rows, strict=True))
    made = figure(8.5, 1.2 + 0.5 * len(rows), alt=f"Time to ready by phase and verdict of each arm. {alt}.")
    axes = made.subplots()
    ends = [_bar(axes, y, row) for y, row in enumerate(rows)]
    widest = max([*ends, 1.0])
    for y, (row, end) in enumerate(zip(rows, ends, strict=True)):
        marker = {"marker": "s", "markersize": 9, "markeredgecolor": "#444444", "color": VERDICT_COLOURS[row.verdict]}
        axes.plot(end + 0.02 * widest, y, linestyle="", **marker)
        axes.text(end + 0.045 * widest, y, f"{row.verdict}{f' ({row.kind})' if row.kind else ''}", va="center", fontsize=9)
        axes.text(0.005 * widest, y + 0.42, _short(row.reason), va="center", fontsize=7, color="#444444")
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.35, -0.5)
    axes.set_xlim(0, 1.2 * widest)
    axes.set_xlabel("seconds after the start")
    _legend_of_states(made, axes, rows)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return made


def _legend_of_states(made: LabFigure, axes: Axes, rows: Sequence[Evidence]) -> None:
    seen = {state for row in rows for state, _ in row.details.get("timeline", ())}
    handles = [Patch(color=colour, label=state) for state, colour in STATE_COLOURS.items() if state in seen]
    if handles:
        made.legend(handles=handles, loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8)


def _bar(axes: Axes, y: int, row: Evidence) -> float:
    """Draw the phases of one start; where the bar ends, in seconds."""
    timeline = row.details.get("timeline", ())
    for (state, began_s), (_, ended_s) in itertools.pairwise(timeline):
        if state in STATE_COLOURS:
            axes.barh(y, ended_s - began_s, left=began_s, color=STATE_COLOURS[state], height=0.5)
    final = [began_s for state, began_s in timeline if state in ("ready", "failed", "hung")]
    return final[0] if final else 0.0


def _short(reason: str, limit: int = 150) -> str:
    return reason if len(reason) <= limit else reason[: limit - 1] + "…"


def token_kl(distances: Mapping[str, Sequence[float]], perfect: Mapping[str, Sequence[float]], reference: str) -> LabFigure:
    """Token-level KL of each arm from the reference: the share of tokens above each value.

    distances: arm -> one value in nats per scored token. perfect: arm -> the same for perfect kernels on its weights, drawn
    dashed in the arm's colour; an arm whose line lies on its dashed one loses nothing that its number format does not cost.
    """
    means = "; ".join(f"{name}: mean {_mean(values):.3g} nats" for name, values in distances.items() if values)
    made = figure(8.5, 3.6, alt=f"Share of tokens whose KL divergence from {reference} exceeds a value, by arm. {means}.")
    axes = made.subplots()
    for colour, (name, values) in zip(itertools.cycle(SERIES_COLOURS), distances.items()):
        for drawn, style in ((values, "-"), (perfect.get(name, ()), "--")):
            if drawn:
                ordered = sorted(max(value, 1e-6) for value in drawn)
                label = f"{name}: mean {_mean(drawn):.3g} nats over {len(drawn)} tokens" if style == "-" else None
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
