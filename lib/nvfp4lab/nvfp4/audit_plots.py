"""Pictures of an audit: which layers are FP4, and what was found."""

import collections

from matplotlib.figure import Figure

from nvfp4lab.nvfp4.audit import Report
from nvfp4lab.records import Verdict
from nvfp4lab.report.style import SERIES_COLOURS, VERDICT_COLOURS, figure


def layers(report: Report) -> Figure:
    """FP4 and other Linear modules by kind; a flag whose kinds have no FP4 bar is moot."""
    summary = report.summary
    kinds = [kind for kind in summary.fp4 if summary.fp4[kind] + summary.other[kind]]
    picture = figure(height_in=1.1 + 0.45 * max(1, len(kinds)))
    axes = picture.subplots()
    fp4, other = [summary.fp4[kind] for kind in kinds], [summary.other[kind] for kind in kinds]
    labels = [str(kind) for kind in kinds]
    axes.barh(labels, fp4, height=0.6, color=SERIES_COLOURS[0], label="FP4")
    axes.barh(labels, other, height=0.6, left=fp4, color=VERDICT_COLOURS[Verdict.UNSUPPORTED], label="not quantised")
    for row, (quantised, rest) in enumerate(zip(fp4, other, strict=True)):
        axes.text(quantised + rest, row, f"  {quantised} of {quantised + rest}", va="center", fontsize=9)
    axes.set_xlim(0, 1.2 * max([1, *(a + b for a, b in zip(fp4, other, strict=True))]))
    axes.invert_yaxis()
    axes.set_xlabel("Linear modules")
    axes.set_title(f"{summary.architecture}: {len(report.findings)} findings", loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="lower right", bbox_to_anchor=(1, 1))
    return picture


def findings(report: Report) -> Figure:
    """How many findings of each kind; one line of text where there are none."""
    counts = collections.Counter(finding.kind for finding in report.findings)
    picture = figure(height_in=0.8 + 0.35 * max(1, len(counts)))
    axes = picture.subplots()
    if not counts:
        axes.text(0.5, 0.5, "nothing found", ha="center", va="center", color=VERDICT_COLOURS[Verdict.OK], fontsize=14)
        axes.set_axis_off()
        return picture
    kinds = [kind for kind, _ in counts.most_common()]
    axes.barh(kinds, [counts[kind] for kind in kinds], color=VERDICT_COLOURS[Verdict.WRONG])
    axes.invert_yaxis()
    axes.set_xlabel("findings")
    return picture
