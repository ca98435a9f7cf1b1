"""Pictures of stage 2: what happened where (a grid of verdicts), and how close to the roofline."""

from collections.abc import Callable, Sequence

from nvfp4lab.records import Evidence, Verdict
from nvfp4lab.report.style import VERDICT_COLOURS, LabFigure, figure

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
