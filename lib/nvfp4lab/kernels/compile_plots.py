"""The picture of notebook 24: what each kernel becomes on each GPU."""

from collections.abc import Sequence

from matplotlib.patches import Patch, Rectangle

from nvfp4lab.records import Evidence, Verdict
from nvfp4lab.report.style import VERDICT_COLOURS, LabFigure, figure

_ROW_IN, _COLUMN_IN, _MARGIN_IN = 0.34, 1.15, 1.1
_WORST_LAST = (Verdict.NOT_RUN, Verdict.OK, Verdict.UNSUPPORTED, Verdict.OOM, Verdict.HANG, Verdict.CRASH, Verdict.WRONG)
_BLACK_ON = (Verdict.UNSUPPORTED, Verdict.NOT_RUN, Verdict.OOM)


def compile_grid(rows: Sequence[Evidence]) -> LabFigure:
    """Module x GPU, coloured by verdict, with the instruction that the machine code holds; of several units the worst."""
    lines, columns = list(dict.fromkeys(map(_module, rows))), list(dict.fromkeys(map(_gpu, rows)))
    worst = {(_module(row), _gpu(row)): row for row in sorted(rows, key=lambda row: _WORST_LAST.index(row.verdict))}
    picture = figure(3.2 + _COLUMN_IN * max(len(columns), 3), _MARGIN_IN + _ROW_IN * len(lines), alt=_describe(rows))
    axes = picture.add_subplot()
    for (line, column), row in worst.items():
        x, y = columns.index(column), lines.index(line)
        colour = VERDICT_COLOURS[row.verdict]
        axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour, edgecolor="#888888", linewidth=0.4))
        ink = "black" if row.verdict in _BLACK_ON else "white"
        axes.text(x, y, _text(row), ha="center", va="center", fontsize=7, color=ink)
    axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(lines) - 0.5, -0.5), title="What each kernel becomes on each GPU")
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(lines)), lines)
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    found = [verdict for verdict in Verdict if any(row.verdict is verdict for row in rows)]
    patches = [Patch(facecolor=VERDICT_COLOURS[verdict], edgecolor="#888888", label=str(verdict)) for verdict in found]
    picture.legend(handles=patches, loc="outside lower center", ncols=len(found) or 1, frameon=False, fontsize=8)
    return picture


def _module(row: Evidence) -> str:
    return row.subject.split(":")[1]


def _gpu(row: Evidence) -> str:
    return f"{row.subject.rsplit(':', 1)[1]}\n(cc {row.target.cc})"


def _text(row: Evidence) -> str:
    """The instruction that matters: the tensor-core one, else the conversion to FP4."""
    if row.verdict is Verdict.WRONG:
        return "empty body"
    if row.verdict is not Verdict.OK:
        return "no product" if "no tensor-core instruction" in row.reason else str(row.verdict)
    instructions = row.details["tensor_instructions"]
    if instructions:
        first = next(iter(instructions)).split(".")
        return f"{first[0]}\n{'E2M1' if 'E2M1' in first else '.'.join(first[1:3])}"
    packed = row.number("fp4_conversions")
    return "F2FP\nE2M1" if packed and packed.value else "ok"


def _describe(rows: Sequence[Evidence]) -> str:
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    return "What each kernel becomes on each GPU: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
