"""Why not the others, and where the stages contradict each other."""

import dataclasses
from collections.abc import Sequence

from nvfp4lab import field_reports
from nvfp4lab.decide.attribution import Attribution
from nvfp4lab.decide.choice import Choice, kernel_ranking
from nvfp4lab.decide.question import OPS, Question
from nvfp4lab.decide.standing import Confidence, Standing, doubt, kernel_failures, outcome
from nvfp4lab.records import BAD, Evidence, Verdict
from nvfp4lab.report.digits import interval
from nvfp4lab.server import which_kernel


@dataclasses.dataclass(frozen=True)
class Rejected:
    """One backend not chosen: why, and the evidence (stage, subject and repro of each record, or a report's id)."""

    backend: str
    op: str
    why: str
    evidence: tuple[str, ...]


def rejected(by_backend: Sequence[Standing], question: Question, choice: Choice, attribution: Attribution) -> tuple[Rejected, ...]:
    """One line for each standing that was not chosen; `auto` is told as what it is here."""
    rows = []
    for standing in by_backend:
        if choice.backends.get(standing.op) == standing.backend:
            continue
        why = _why_not(standing, choice, by_backend)
        if standing.backend == "auto" and standing.op in attribution.autos:
            why = f"{attribution.autos[standing.op].line}: {why}"
        elif doubted := standing.disputed or standing.less_exact:
            why += f"; but {doubt(doubted)}"
        reports = field_reports.about(standing.op, standing.backend, question.cc)
        if reports:
            why += f"; {Confidence.REPORTED}: {', '.join(report.id for report in reports)}"
        rows.append(Rejected(standing.backend, standing.op, why, (*cited(standing), *(f"report {r.id}" for r in reports))))
    return tuple(rows)


def reports(by_backend: Sequence[Standing], question: Question) -> tuple[field_reports.FieldReport, ...]:
    """What others reported about any of the backends on this capability, each once: lines about backends cite the ids."""
    found = (report for one in by_backend for report in field_reports.about(one.op, one.backend, question.cc))
    return tuple(dict.fromkeys(found))


def cited(standing: Standing) -> tuple[str, ...]:
    """Every record behind a standing, the decisive one first, with the command that repeats it."""
    decisive = [standing.decisive] if standing.decisive else []
    others = [record for record in standing.records if record is not standing.decisive]
    return tuple(f"{record.stage} {record.subject} {record.verdict}: {record.repro}" for record in (*decisive, *others))


def _why_not(standing: Standing, choice: Choice, by_backend: Sequence[Standing]) -> str:
    why = standing.why
    is_chosen = standing.alias_of is not None and choice.backends.get(standing.op) == standing.alias_of
    if is_chosen and standing.verdict is Verdict.OK:
        return "what is chosen, but by name: the meaning of auto changes with the version"
    if standing.verdict is Verdict.NOT_RUN:
        ran_here = any(s.confidence is Confidence.MEASURED for s in by_backend)
        lacking = "it was not run here" if ran_here else "needs a card"
        return f"not ruled out, not measured: {lacking} ({why.removeprefix('not_run, ')})"
    if standing.verdict is not Verdict.OK:
        return why
    backend = standing.alias_of or standing.backend
    if any(f"{OPS[standing.op]} {backend} " in f"{tie} " for tie in choice.ties):
        return f"no difference measured; {why}"
    if not choice.backends:
        return f"right, but nothing is recommended; {why}"
    if choice.from_kernels:
        return f"right, but {_slower(standing.op, backend, by_backend)}; {why}"
    if not standing.served:
        return f"its kernel is right here, but no server was started with it; {why}"
    return f"right, but not in the fastest sound arm; {why}"


def _slower(op: str, backend: str, by_backend: Sequence[Standing]) -> str:
    """How its kernel's time stands beside the fastest one's."""
    ranking = kernel_ranking(by_backend, op)
    if ranking.best is None or backend not in ranking.speeds:
        return "it was not timed on the cases of the others"
    ratio = ranking.speeds[backend].value / ranking.speeds[ranking.best].value
    return f"not chosen: {interval(ranking.speeds[backend])} over {ranking.where}, {ratio:.2f} times {ranking.best}'s"


def contradictions(by_backend: Sequence[Standing], ours: Sequence[Evidence], attribution: Attribution) -> tuple[str, ...]:
    """Where stages disagree about one backend: someone is mistaken, and it may be us."""
    lines = [auto.conflict for auto in attribution.autos.values() if auto.conflict]
    for standing in by_backend:
        if standing.alias_of is None:
            lines += [f"{standing.op} {standing.backend}: {line}" for line in _disagreements(standing)]
    for record in ours:
        if record.stage in ("server", "load"):
            lines += [f"{record.subject}: {line}" for line in _witnesses(record, attribution)]
    return tuple(dict.fromkeys(lines))


def _disagreements(standing: Standing) -> list[str]:
    by_stage: dict[str, list[Evidence]] = {}
    for record in standing.records:
        by_stage.setdefault(record.stage, []).append(record)
    verdicts = {stage: {record.verdict for record in records} for stage, records in by_stage.items()}
    source, kernel, server = (verdicts.get(stage, set()) for stage in ("source", "kernel", "server"))
    lines = []
    if Verdict.UNSUPPORTED in source and Verdict.OK in server:
        lines.append("the source says it raises, yet it ran and was right")
    elif Verdict.UNSUPPORTED in source and Verdict.OK in kernel:
        lines.append("the source says that a server with it raises, yet its kernel, called directly, was right")
    if kernel == {Verdict.OK} and standing.verdict in BAD:  # its server's fault, not that of the other backend of an arm
        lines.append(f"its kernel passes the gate, its server does not: {standing.why}")
    ran = [record for record in by_stage.get("kernel", ()) if record.verdict is not Verdict.NOT_RUN]
    failures = kernel_failures(ran, judged_right=True)
    failing = failures.decisive + failures.disputed
    if failing and Verdict.OK in server:
        meaning = ": is that kernel the one that ran?"
        if any(_traced(record, standing) for record in by_stage["server"]):
            meaning = ", and its trace shows this kernel: the probes ask more of it than those prompts did."
        lines.append(
            f"its kernel fails probes, yet a server with it answers right{meaning} "
            f"{len(failing)} of {len(ran)} kernel records fail, first {failing[0].subject}: {outcome(failing[0])}"
        )
    return lines + [record.details["mismatch"] for record in standing.records if record.details.get("mismatch")]


def _traced(record: Evidence, standing: Standing) -> bool:
    """Whether a profiled step of a server that was right shows this backend's kernel at work."""
    rows = record.details.get("kernels") or () if record.verdict is Verdict.OK else ()
    family = which_kernel.of_backend(standing.backend)
    return any(row.get("operation") == standing.op and family in (row.get("trace") or ()) for row in rows)


def _witnesses(record: Evidence, attribution: Attribution) -> list[str]:
    """Testimonies of one server that do not fit: another kernel than the one meant, or a flag that reached no layer."""
    seen = [row for row in record.details.get("kernels") or () if not row.get("ok") and row.get("trace")]
    lines = [row["why"] for row in seen]
    if record.stage == "server" and record.verdict is Verdict.OK:
        flags = [f"{OPS[op]} was given" for op in attribution.moot_in(record)]
        lines += [f"{flag}, yet its witnesses saw no FP4 layer of that kind: the arm says nothing about the flag" for flag in flags]
    return lines
