"""How notebook 40 shows a decision: the command first, then one picture, then the tables."""

import html
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nvfp4lab.decide.decision import Decision
from nvfp4lab.decide.question import OPS
from nvfp4lab.decide.standing import Confidence, Standing
from nvfp4lab.records import Evidence, Verdict
from nvfp4lab.report.style import VERDICT_COLOURS, figure
from nvfp4lab.report.tables import Html, table

SHOWN_EVIDENCE = 2  # records a line; a kernel may have hundreds
NOT_RULED_OUT = "#CFE8F7"  # a reading is never `ok`, yet it is more than nothing
COLUMNS: dict[str, frozenset[str]] = {  # title -> stages; what a server said is kept apart from what kernels said
    Confidence.READ: frozenset({"source"}),
    Confidence.COMPILED: frozenset({"compile"}),
    "kernels\nmeasured here": frozenset({"kernel"}),
    "servers\nmeasured here": frozenset({"server", "load"}),
}


def headline(decision: Decision) -> Html:
    """Contradictions, then the command or the reason why there is none."""
    asked = decision.question
    lines = [f"<p><b>Contradiction:</b> {html.escape(line)}</p>" for line in decision.contradictions]
    lines.append(
        f'<pre class="lab-command">{html.escape(decision.command)}</pre>'
        if decision.command
        else "<p><b>No recommendation.</b></p>"
    )
    lines.append(
        f"<p>{html.escape(decision.why[0].upper() + decision.why[1:])}"
        + (f" ({html.escape(decision.confidence)})" if decision.confidence else "")
        + ".</p>"
    )
    lines += [f"<p>{html.escape(line[0].upper() + line[1:])}.</p>" for line in decision.beside]
    lines += [f"<p>Moot: {html.escape(line)}</p>" for line in decision.moot]
    others = decision.other_stacks
    left_out = f" Left out: {others} records about backends of another GPU or other versions." if others else ""
    versions = (
        f"SGLang {html.escape(asked.sglang or 'of any version')}, FlashInfer {html.escape(asked.flashinfer or 'of any version')}"
    )
    lines.append(f"<p>Asked for: compute capability {html.escape(asked.cc)}, {versions}.{left_out}</p>")
    return Html("".join(lines))


def draw(decision: Decision) -> Figure:
    """Backends by way of knowing, coloured by verdict: what is read, what was compiled, what was measured here."""
    rows = [standing for op in OPS for standing in decision.standings if standing.op == op]
    said = "; ".join(f"{_label(standing)}: {standing.verdict}, {standing.confidence or 'nothing known'}" for standing in rows)
    made = figure(7.5, 0.26 * max(len(rows), 1) + 0.9, alt=f"Verdict of each backend by how it is known. {said}.")
    axes = made.subplots()
    for place, standing in enumerate(rows):
        for column, stages in enumerate(COLUMNS.values()):
            axes.barh(
                place,
                0.96,
                left=column,
                height=0.84,
                color=_colour(standing, stages),
                edgecolor="#999",
                linewidth=0.5,
            )
        if decision.chosen.get(standing.op) == standing.backend:
            axes.text(len(COLUMNS) + 0.03, place, "chosen", va="center", fontsize=9, weight="bold")
    axes.set_yticks(range(len(rows)), [_label(standing) for standing in rows], fontsize=8)
    axes.set_xticks([column + 0.48 for column in range(len(COLUMNS))], list(COLUMNS), fontsize=9)
    axes.set_xlim(0, len(COLUMNS) + 0.45)
    axes.xaxis.tick_top()
    axes.set_ylim(max(len(rows), 1) - 0.5, -0.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    shown = [verdict for verdict in Verdict if any(_verdict(s, stages) is verdict for s in rows for stages in COLUMNS.values())]
    patches = [Patch(facecolor=VERDICT_COLOURS[verdict], edgecolor="#999", label=str(verdict)) for verdict in shown]
    patches.append(Patch(facecolor=NOT_RULED_OUT, edgecolor="#999", label="not ruled out"))
    made.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=8, frameon=False)
    return made


def _label(standing: Standing) -> str:
    meaning = f" = {standing.alias_of}" if standing.alias_of else ""
    return f"{standing.op}  {standing.backend}{meaning}"


def why_not(decision: Decision) -> Html:
    """One line for each backend not chosen, with the records it rests on first; all of them are in the table of evidence."""
    rows = ((r.op, r.backend, r.why, _first(r.evidence)) for r in decision.rejected)
    return table(("op", "backend", "why not", "evidence"), rows)


def _first(evidence: Sequence[str]) -> str:
    more = len(evidence) - SHOWN_EVIDENCE
    return "; ".join(evidence[:SHOWN_EVIDENCE]) + (f"; and {more} more" if more > 0 else "")


def reports(decision: Decision) -> Html:
    """What others saw on this capability, by the ids that `why_not` cites."""
    rows = ((report.id, report.source, report.versions, report.symptom) for report in decision.reports)
    return table(("report", "where", "versions", "what they saw"), rows)


def expiry(decision: Decision) -> Html:
    """Which version change asks for a new decision."""
    rows = ((name, change["now"], change["invalidates"]) for name, change in decision.expires_with.items())
    return table(("when this changes", "from", "these no longer hold"), rows)


def evidence_table(records: Sequence[Evidence]) -> Html:
    """Every record, with how to repeat it."""
    return table(
        ("stage", "subject", "cc", "verdict", "reason", "repeat it with"),
        ((r.stage, r.subject, r.target.cc, r.verdict, r.reason, r.repro) for r in records),
    )


def _colour(standing: Standing, stages: frozenset[str]) -> str:
    """Colour of a cell; a backend that source leaves open differs from one of which nothing is known."""
    verdict = _verdict(standing, stages)
    read = any(record.stage == "source" for record in standing.records if record.stage in stages)
    return NOT_RULED_OUT if verdict is Verdict.NOT_RUN and read else VERDICT_COLOURS[verdict]


def _verdict(standing: Standing, stages: frozenset[str]) -> Verdict:
    """The worst verdict known from these stages; NOT_RUN when nothing is known from them."""
    verdicts = [record.verdict for record in standing.records if record.stage in stages]
    order = (Verdict.WRONG, Verdict.CRASH, Verdict.HANG, Verdict.OOM, Verdict.UNSUPPORTED, Verdict.OK)
    return next((verdict for verdict in order if verdict in verdicts), Verdict.NOT_RUN)
