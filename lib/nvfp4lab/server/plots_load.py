"""Pictures of the load sweep: throughput and latency by concurrency, with what is void shown as void."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from nvfp4lab.records import Verdict
from nvfp4lab.report.style import SERIES_COLOURS, VERDICT_COLOURS, LabFigure, figure
from nvfp4lab.server import load_stats
from nvfp4lab.server.load_evidence import Cell, Table
from nvfp4lab.server.params import LoadShape

NEAR = 3.0  # a service level further above all that was measured would press the curves onto the axis


def curves(table: Table) -> LabFigure:
    """One row of panels per prompt/answer length: output tokens per second, and the time per output token."""
    shapes = list(dict.fromkeys(cell.shape for cell in table.cells))
    names = ", ".join(dict.fromkeys(cell.arm.name for cell in table.cells))
    made = figure(8.5, 0.9 + 2.6 * max(len(shapes), 1), alt=f"Throughput and time per output token by concurrency: {names}.")
    panels = made.subplots(max(len(shapes), 1), 2, squeeze=False)
    for row, shape in zip(panels, shapes, strict=False):
        _throughput(row[0], table, shape)
        _latency(row[1], table, shape)
    handles, labels = panels[0][0].get_legend_handles_labels()
    if handles:
        made.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False, fontsize=8)
    return made


def _throughput(axes: Axes, table: Table, shape: LoadShape) -> None:
    for colour, cells in _series(table, shape):
        good = [cell for cell in cells if cell.sound]
        speeds = [load_stats.bootstrap([cell.runs[number] for number in sorted(cell.runs)]) for cell in good]
        x = [cell.concurrency for cell in good]
        bars = [[n.value - n.low for n in speeds], [n.high - n.value for n in speeds]]
        axes.errorbar(x, [n.value for n in speeds], bars, marker="o", capsize=3, color=colour, label=cells[0].arm.name)
        _mark_void(axes, cells)
    near = [cell for cell in table.cells if cell.shape == shape and cell.near_ceiling]
    if near:
        axes.plot([c.concurrency for c in near], [c.ceiling_tok_s for c in near], "k--", label="client's own ceiling")
    _dress(axes, table, f"{shape.input_tokens} in, {shape.output_tokens} out; bar: bootstrap over starts", "output tokens / s")


def _latency(axes: Axes, table: Table, shape: LoadShape) -> None:
    """Median as a line, the 99th percentile as the top of the bar; the service level where it is near."""
    highest = 0.0
    for colour, cells in _series(table, shape):
        good = [cell for cell in cells if cell.sound]
        found = [{n.name: n.value for n in cell.numbers(table.p.slo)} for cell in good]
        middle, high = ([numbers[name] for numbers in found] for name in ("tpot_p50", "tpot_p99"))
        tops = [h - m for m, h in zip(middle, high, strict=True)]
        highest = max([highest, *high])
        axes.errorbar([c.concurrency for c in good], middle, [[0.0] * len(tops), tops], marker="o", capsize=3, color=colour)
    if table.p.slo.tpot_ms is not None and table.p.slo.tpot_ms <= NEAR * highest:
        axes.axhline(table.p.slo.tpot_ms, color="#888888", linestyle=":")
        axes.text(
            0.99, table.p.slo.tpot_ms, "service level ", transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=7
        )
    _dress(axes, table, "median, bar to the 99th percentile", "ms per output token")


def _series(table: Table, shape: LoadShape) -> list[tuple[str, list[Cell]]]:
    names = list(dict.fromkeys(cell.arm.name for cell in table.cells))
    cells = [[cell for cell in table.cells if cell.arm.name == name and cell.shape == shape] for name in names]
    return [(SERIES_COLOURS[index % len(SERIES_COLOURS)], group) for index, group in enumerate(cells)]


def _mark_void(axes: Axes, cells: Sequence[Cell]) -> None:
    for cell in cells:
        if cell.voids:
            verdict = next(iter(cell.voids.values())).verdict
            colour = VERDICT_COLOURS.get(verdict, VERDICT_COLOURS[Verdict.WRONG])
            axes.plot([cell.concurrency], [0], "x", color=colour, markersize=9, markeredgewidth=2.5, clip_on=False)


def _dress(axes: Axes, table: Table, title: str, ylabel: str) -> None:
    ticks = sorted({cell.concurrency for cell in table.cells})
    axes.set_title(title, fontsize=9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("requests in flight")
    axes.set_ylabel(ylabel)
    axes.set_ylim(bottom=0)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
