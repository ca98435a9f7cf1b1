"""Pictures of stage 3. Each takes records and returns a Figure; none computes a result."""

import itertools
from collections.abc import Mapping, Sequence

from nvfp4lab.records import Evidence, Verdict
from nvfp4lab.report.style import SERIES_COLOURS, VERDICT_COLOURS, LabFigure, figure

STATE_COLOURS = {
    "importing": "#C6DBEF",
    "loading": "#6BAED6",
    "compiling": "#E69F00",
    "capturing": "#9E9AC8",
    "warming": "#2171B5",
}


def starts(rows: Sequence[Evidence]) -> LabFigure:
    """One bar per arm: what its start spent its time on, and the verdict at its end.

    rows: evidence of stage "server"; the timeline is in `details`. Arms that were not started have a verdict only.
    """
    names = [row.subject.removeprefix("arm:") for row in rows]
    alt = "; ".join(f"{name}: {row.verdict}" for name, row in zip(names, rows, strict=True))
    made = figure(7.5, 1.2 + 0.45 * len(rows), alt=f"Time to ready by phase and verdict of each arm. {alt}.")
    axes = made.subplots()
    ends = [_bar(axes, y, row) for y, row in enumerate(rows)]
    widest = max([*ends, 1.0])
    for y, (row, end) in enumerate(zip(rows, ends, strict=True)):
        label = f"{row.verdict}{f' ({row.kind})' if row.kind else ''}"
        axes.plot(
            end + 0.015 * widest, y, "s", color=VERDICT_COLOURS[row.verdict], markersize=9, markeredgecolor="#444444", clip_on=False
        )
        axes.text(end + 0.035 * widest, y, f"{label}  {_short(row.reason)}", va="center", fontsize=8)
    axes.set_yticks(range(len(rows)), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, 1.45 * widest)
    axes.set_xlabel("seconds after the start")
    seen = {state for row in rows for state, _ in row.details.get("timeline", ())}
    handles = [axes.barh(0, 0, color=colour, label=state) for state, colour in STATE_COLOURS.items() if state in seen]
    if handles:
        made.legend(loc="outside upper center", ncols=len(handles), frameon=False, fontsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return made


def _bar(axes, y: int, row: Evidence) -> float:
    """Draw the phases of one start; where the bar ends, in seconds."""
    timeline = row.details.get("timeline", ())
    for (state, began_s), (_, ended_s) in itertools.pairwise(timeline):
        if state in STATE_COLOURS:
            axes.barh(y, ended_s - began_s, left=began_s, color=STATE_COLOURS[state], height=0.55)
    final = [began_s for state, began_s in timeline if state in ("ready", "failed", "hung")]
    return final[0] if final else 0.0


def _short(reason: str, limit: int = 48) -> str:
    return reason if len(reason) <= limit else reason[: limit - 1] + "…"


def token_kl(divergences_nats: Mapping[str, Sequence[float]], reference: str) -> LabFigure:
    """Token-level KL of each arm against the reference arm: the share of tokens above each value.

    divergences_nats: arm -> one value per scored token.
    """
    made = figure(7.5, 3.2, alt=f"Share of tokens whose KL divergence from {reference} exceeds a value, by arm.")
    axes = made.subplots()
    for colour, (name, values) in zip(SERIES_COLOURS, divergences_nats.items(), strict=False):
        ordered = sorted(max(value, 1e-6) for value in values)
        shares = [1 - index / len(ordered) for index in range(len(ordered))]
        mean = sum(values) / len(values)
        axes.step(ordered, shares, where="post", color=colour, label=f"{name}: mean {mean:.4f} nats, n = {len(values)}")
    axes.set_xscale("log")
    axes.set_xlabel(f"KL({reference} || arm) per token, nats")
    axes.set_ylabel("share of tokens above")
    axes.set_ylim(0, 1.02)
    if divergences_nats:
        axes.legend(frameon=False, fontsize=8)
    return made


def verdict_counts(rows: Sequence[Evidence]) -> str:
    """'2 ok, 1 crash' in the order of the vocabulary."""
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    return ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
