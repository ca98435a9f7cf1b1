"""The choice: fastest of what was measured right on this stack and GPU. No evidence, no recommendation."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from nvfp4lab import field_reports
from nvfp4lab.decide.choice import choose
from nvfp4lab.decide.question import OPS, Question, backends_of, last_word, partition
from nvfp4lab.decide.standing import BAD, Confidence, Standing, standings
from nvfp4lab.kernels.flag_values import FLAG_OF
from nvfp4lab.records import Evidence, Stack, Verdict

EXPIRES: dict[str, str] = {
    "sglang": "routes, server arms and the choice itself",
    "flashinfer": "kernel verdicts, speeds and server arms",
    "kernel_package": "Marlin and SGLang's own kernels",
    "cuda": "every compiled kernel",
    "driver": "speeds and crashes",
}


@dataclasses.dataclass(frozen=True)
class Rejected:
    """One backend not chosen: why, and the evidence (stage, subject and repro of each record, or a report's id)."""

    backend: str
    op: str
    why: str
    evidence: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to launch and why. command None: nothing can be recommended, and `why` says what is missing.

    chosen: backend by op. no_difference: combinations whose speed cannot be told apart from the chosen one's.
    expires_with: {version name: {"now": value, "invalidates": what}}.
    """

    question: Question
    command: str | None
    chosen: dict[str, str]
    why: str
    confidence: str | None
    rejected: tuple[Rejected, ...]
    contradictions: tuple[str, ...]
    no_difference: tuple[str, ...]
    moot: tuple[str, ...]
    expires_with: dict[str, Any]
    other_stacks: int
    standings: tuple[Standing, ...] = ()

    def to_data(self) -> dict[str, Any]:
        """Plain data in the shape of the `decide --json` contract."""
        shown = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "standings"}
        return shown | {
            "question": dataclasses.asdict(self.question),
            "rejected": [dataclasses.asdict(row) for row in self.rejected],
        }


def decide(question: Question, records: Sequence[Evidence]) -> Decision:
    """Join all records into one decision for `question`."""
    ours, foreign = partition(question, last_word(records))
    moot = _moot(records)
    by_backend = [standing for standing in standings(ours) if standing.op not in moot]
    combination, why, ties = choose(question, by_backend, ours, moot)
    confidence = _confidence(combination, ours)
    return Decision(
        question=question,
        command=_command(question, combination) if combination else None,
        chosen=combination,
        why=why,
        confidence=confidence,
        rejected=tuple(
            _reject(standing, question, ties) for standing in by_backend if combination.get(standing.op) != standing.backend
        ),
        contradictions=tuple(_contradictions(by_backend, _failing_kernels(ours))),
        no_difference=ties,
        moot=tuple(f"{OPS[op]} touches no layer of this checkpoint" for op in sorted(moot)),
        expires_with=_expires(question, ours),
        other_stacks=len(foreign),
        standings=tuple(by_backend),
    )


def _reject(standing: Standing, question: Question, ties: tuple[str, ...]) -> Rejected:
    why = standing.why
    if standing.verdict is Verdict.OK:
        tied = any(f"{OPS[standing.op]} {standing.backend}" in tie for tie in ties)
        why = ("no difference measured; " if tied else "right, but not in the fastest sound arm; ") + why
    elif standing.verdict is Verdict.NOT_RUN:
        why = f"not ruled out, not measured: needs a card ({why.removeprefix('not_run, ')})"
    reports = field_reports.about(standing.op, standing.backend, question.cc)
    if reports:
        why += "; " + "; ".join(f"{Confidence.REPORTED} ({report.source}): {report.symptom}" for report in reports)
    evidence = tuple(f"{record.stage} {record.subject} {record.verdict}: {record.repro}" for record in standing.records)
    return Rejected(standing.backend, standing.op, why, evidence + tuple(f"report {report.id}" for report in reports))


def _contradictions(by_backend: Sequence[Standing], failing: set[tuple[str, str]]) -> list[str]:
    """Where stages disagree about one backend: someone is mistaken, and it may be us. failing: as of `_failing_kernels`."""
    lines = []
    for standing in by_backend:
        by_stage: dict[str, set[Verdict]] = {}
        for record in standing.records:
            by_stage.setdefault(record.stage, set()).add(record.verdict)
        name = f"{standing.op} {standing.backend}"
        ran = by_stage.get("kernel", set()) | by_stage.get("server", set())
        if Verdict.UNSUPPORTED in by_stage.get("source", set()) and Verdict.OK in ran:
            lines.append(f"{name}: the source says it raises, yet it ran and was right")
        if by_stage.get("kernel") == {Verdict.OK} and by_stage.get("server", set()) & BAD:
            lines.append(f"{name}: its kernel passes the gate, its server does not: {standing.why}")
        if (standing.op, standing.backend) in failing and Verdict.OK in by_stage.get("server", set()):
            lines.append(f"{name}: its kernel fails the gate, yet a server with it answers right: is that kernel the one that ran?")
        flagged = [record.details["mismatch"] for record in standing.records if record.details.get("mismatch")]
        lines += [f"{name}: {mismatch}" for mismatch in flagged]
    return lines


def _failing_kernels(records: Sequence[Evidence]) -> set[tuple[str, str]]:
    """(op, backend) of each flag value that leads to a kernel on which a probe failed."""
    failed = [record for record in records if record.stage == "kernel" and record.verdict in BAD]
    by_own_name = {FLAG_OF[name] for record in failed if (name := record.details.get("case", {}).get("backend")) in FLAG_OF}
    return by_own_name | {pair for record in failed for pair in backends_of(record).items()}


def _confidence(combination: dict[str, str], ours: Sequence[Evidence]) -> str | None:
    """Confidence of the choice: it is only made from what was measured."""
    if not combination:
        return None
    stages = sorted(
        {r.stage for r in ours if r.verdict is Verdict.OK and backends_of(r).items() & combination.items() and r.stage != "source"}
    )
    return f"{Confidence.MEASURED} ({', '.join(stages)})"


def _moot(records: Sequence[Evidence]) -> frozenset[str]:
    """Ops that touch no FP4 layer of the checkpoint, as the audit counted them."""
    flags = {flag for record in records if record.stage == "checkpoint" for flag in record.details.get("moot_flags", ())}
    return frozenset(op for op, flag in OPS.items() if flag in flags or flag.strip("-").replace("-", "_") in flags or op in flags)


def _command(question: Question, combination: dict[str, str]) -> str:
    flags = " ".join(f"{flag} {combination[op]}" for op, flag in OPS.items() if op in combination)
    tp = f" --tp {question.tp}" if question.tp > 1 else ""
    quantization = f" --quantization {question.quantization_flag}" if question.quantization_flag else ""
    return f"python -m sglang.launch_server --model-path {question.model}{tp}{quantization} {flags}"


def _expires(question: Question, ours: Sequence[Evidence]) -> dict[str, Any]:
    stack = next((record.stack for record in reversed(ours) if record.stage in ("server", "load", "kernel")), Stack())
    now = {name: getattr(stack, name) or getattr(question, name, None) for name in EXPIRES}
    return {name: {"now": value, "invalidates": EXPIRES[name]} for name, value in now.items() if value}
