"""Pictures of stage 2: what happened where (a grid of verdicts), and how close to the roofline."""

from collections.abc import Callable, Sequence

from nvfp4lab.records import Evidence, Verdict
from nvfp4lab.report.style import SERIES_COLOURS, VERDICT_COLOURS, LabFigure, figure

_ROW_IN, _COLUMN_IN, _MARGIN_IN = 0.34, 1.15, 1.1


def verdict_grid(
    rows: Sequence[Evidence],
    row_of: Callable[[Evidence], str],
    column_of: Callable[[Evidence], str],
    text_of: Callable[[Evidence], str] = lambda row: str(row.verdict),
    title: str = "",
) -> LabFigure:
    """One cell per (row, column), coloured by verdict and labelled; where several records share a cell, the worst is shown."""
    lines, columns = list(dict.fromkeys(map(row_of, rows))), list(dict.fromkeys(map(column_of, rows)))
    worst: dict[tuple[str, str], Evidence] = {}
    for row in sorted(rows, key=_severity):
        worst[row_of(row), column_of(row)] = row
    picture = figure(3.2 + _COLUMN_IN * max(len(columns), 3), _MARGIN_IN + _ROW_IN * len(lines), alt=_describe(rows, title))
    axes = picture.add_subplot()
    for (line, column), row in worst.items():
        x, y = columns.index(column), lines.index(line)
        axes.add_patch(_cell(x, y, row.verdict))
        axes.text(x, y, text_of(row), ha="center", va="center", fontsize=7, color=_ink(row.verdict))
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(lines) - 0.5, -0.5), title=title)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(lines)), lines)
    axes.tick_params(length=0, labelsize=8)
    for spine in axes.spines.values():
        spine.set_visible(False)
    _legend(axes, worst.values())
    return picture


def compile_grid(rows: Sequence[Evidence]) -> LabFigure:
    """Compile evidence: module x GPU, with the tensor-core instruction that the machine code holds."""
    return verdict_grid(
        rows,
        row_of=lambda row: row.subject.split(":")[1],
        column_of=lambda row: f"{row.subject.rsplit(':', 1)[1]}\n(cc {row.target.cc})",
        text_of=_compile_text,
        title="What each kernel becomes on each GPU",
    )


def _compile_text(row: Evidence) -> str:
    """The instruction that matters: the tensor-core one, else the conversion to FP4."""
    if row.verdict is Verdict.WRONG:
        return "empty body"
    if row.verdict is not Verdict.OK:
        return str(row.verdict)
    instructions = row.details["tensor_instructions"]
    if instructions:
        first = next(iter(instructions)).split(".")
        return f"{first[0]}\n{'E2M1' if 'E2M1' in first else '.'.join(first[1:3])}"
    packed = row.number("fp4_conversions")
    return "F2FP\nE2M1" if packed and packed.value else "ok"


def roofline(rows: Sequence[Evidence]) -> LabFigure:
    """Achieved TFLOP/s of every timed case over its arithmetic intensity, under the roofs measured in the same run.

    `rows`: evidence of kernels, with the record of the peaks among it. Cases without a time are left out: a kernel whose
    gate failed has no speed. Bars: 95 % interval of the median.
    """
    timed = [row for row in rows if row.number("tflop_s")]
    picture = figure(7.5, 4.2, alt=f"Roofline of {len(timed)} timed kernel cases")
    axes = picture.add_subplot()
    for index, name in enumerate(dict.fromkeys(_backend(row) for row in timed)):
        mine = [row for row in timed if _backend(row) == name]
        rates = [row.number("tflop_s") for row in mine]
        middle = [rate.value for rate in rates]
        spread = [[rate.value - rate.low for rate in rates], [rate.high - rate.value for rate in rates]]
        colour = SERIES_COLOURS[index % len(SERIES_COLOURS)]
        axes.errorbar([_intensity(row) for row in mine], middle, yerr=spread, fmt="o", ms=4, lw=1, color=colour, label=name)
    for peaks in [row for row in rows if row.number("peak_memory_gb_s")][-1:]:
        _roofs(axes, peaks, [_intensity(row) for row in timed] or [1.0])
    axes.set(
        xscale="log", yscale="log", xlabel="FLOP per byte moved at least once", ylabel="TFLOP/s", title="How close to the roofline"
    )
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    return picture


def _roofs(axes, peaks: Evidence, intensities: Sequence[float]) -> None:
    """One roof for each arithmetic: the memory slope, then that arithmetic's ceiling."""
    bandwidth_tb_s = peaks.number("peak_memory_gb_s").value / 1e3
    for number in peaks.numbers:
        if not number.name.endswith("_tflop_s"):
            continue
        ridge = number.value / bandwidth_tb_s
        reach = [min(*intensities, ridge) / 2, ridge, max(*intensities, ridge) * 2]
        axes.plot(reach, [min(x * bandwidth_tb_s, number.value) for x in reach], color="#555555", lw=1, zorder=0)
        name = number.name.removeprefix("peak_").removesuffix("_tflop_s")
        axes.annotate(f"{name}: {number.value:,.3g} TFLOP/s", (reach[2], number.value), ha="right", va="bottom", fontsize=7)


def _backend(row: Evidence) -> str:
    return row.subject.split(":")[1]


def _intensity(row: Evidence) -> float:
    return row.number("flops").value / row.number("min_bytes").value


def _severity(row: Evidence) -> int:
    order = (Verdict.NOT_RUN, Verdict.UNSUPPORTED, Verdict.OK, Verdict.OOM, Verdict.HANG, Verdict.CRASH, Verdict.WRONG)
    return order.index(row.verdict)


def _cell(x: int, y: int, verdict: Verdict):
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=VERDICT_COLOURS[verdict], edgecolor="#888888", linewidth=0.4)


def _ink(verdict: Verdict) -> str:
    return "black" if verdict in (Verdict.UNSUPPORTED, Verdict.NOT_RUN, Verdict.OOM) else "white"


def _legend(axes, rows) -> None:
    from matplotlib.patches import Patch

    found = [verdict for verdict in Verdict if any(row.verdict is verdict for row in rows)]
    patches = [Patch(facecolor=VERDICT_COLOURS[verdict], edgecolor="#888888", label=str(verdict)) for verdict in found]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=len(found) or 1, frameon=False, fontsize=8)


def _describe(rows: Sequence[Evidence], title: str) -> str:
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    return f"{title}: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
