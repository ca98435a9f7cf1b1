"""The choice: fastest of what was measured right on this stack and GPU. No evidence, no recommendation."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from nvfp4lab import field_reports
from nvfp4lab.decide.question import OPS, Question, backends_of, partition
from nvfp4lab.decide.standing import BAD, Confidence, Standing, overlap, standings, throughput
from nvfp4lab.records import Evidence, Number, Stack, Verdict

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
    ours, foreign = partition(question, records)
    moot = _moot(records)
    by_backend = [standing for standing in standings(ours) if standing.op not in moot]
    combination, why, ties = _choose(by_backend, ours, moot)
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
        contradictions=tuple(_contradictions(by_backend)),
        no_difference=ties,
        moot=tuple(f"{OPS[op]} touches no layer of this checkpoint" for op in sorted(moot)),
        expires_with=_expires(question, ours),
        other_stacks=len(foreign),
        standings=tuple(by_backend),
    )


def _choose(
    by_backend: Sequence[Standing], ours: Sequence[Evidence], moot: frozenset[str]
) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """({op: backend}, why, combinations with no measurable difference). Empty when the evidence does not carry a choice."""
    right = {(s.op, s.backend) for s in by_backend if s.verdict is Verdict.OK}
    arms: dict[tuple[tuple[str, str], ...], list[Evidence]] = {}
    for record in ours:
        named = {op: backend for op, backend in backends_of(record).items() if op not in moot}
        if named and record.stage in ("server", "load") and record.verdict is not Verdict.NOT_RUN:
            arms.setdefault(tuple(sorted(named.items())), []).append(record)
    sound = {arm: about for arm, about in arms.items() if set(arm) <= right and not any(record.verdict in BAD for record in about)}
    if sound:
        return _fastest(sound)
    ops = [op for op in OPS if op not in moot]
    choice = {op: next((s.backend for s in by_backend if s.op == op and s.verdict is Verdict.OK), None) for op in ops}
    known = {op: backend for op, backend in choice.items() if backend}
    if known and len(known) == len([op for op in ops if any(s.op == op for s in by_backend)]):
        return known, "kernels measured right on this GPU; no server was started with these flags yet", ()
    return {}, _what_is_missing(by_backend, ours), ()


def _fastest(sound: dict) -> tuple[dict[str, str], str, tuple[str, ...]]:
    speeds: dict[tuple, Number] = {arm: number for arm, about in sound.items() if (number := throughput(about))}
    if not speeds:
        best = max(sound, key=lambda arm: (len(arm), len(sound[arm])))
        return dict(best), "the server answered right with these flags; no sound speed was measured to rank it", ()
    best = max(speeds, key=lambda arm: speeds[arm].value)
    ties = tuple(_named(arm) for arm in speeds if arm != best and overlap(speeds[arm], speeds[best]))
    number = speeds[best]
    interval = f" [{number.low:g}, {number.high:g}]" if number.low is not None and number.high is not None else ""
    tail = f"; no difference to {', '.join(ties)}" if ties else ""
    return dict(best), f"right, and the fastest measured: {number.value:g} {number.unit}{interval}{tail}", ties


def _what_is_missing(by_backend: Sequence[Standing], ours: Sequence[Evidence]) -> str:
    if not by_backend:
        return "no evidence: nothing was read or run for this stack and GPU"
    if not any(record.stage in ("kernel", "server", "load") and record.verdict is not Verdict.NOT_RUN for record in ours):
        open_ones = [f"{s.op} {s.backend}" for s in by_backend if s.verdict is Verdict.NOT_RUN]
        left = ", ".join(open_ones) or "nothing"
        return f"nothing was run on this GPU with this stack; source reading leaves open: {left}. The rest needs a card"
    lacking = [
        op
        for op in OPS
        if any(s.op == op for s in by_backend) and not any(s.op == op and s.verdict is Verdict.OK for s in by_backend)
    ]
    return f"no backend was measured right for {', '.join(lacking)}"


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


def _contradictions(by_backend: Sequence[Standing]) -> list[str]:
    """Where stages disagree about one backend: someone is mistaken, and it may be us."""
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
        if by_stage.get("kernel", set()) & BAD and Verdict.OK in by_stage.get("server", set()):
            lines.append(f"{name}: its kernel fails the gate, yet a server with it answers right: is that kernel the one that ran?")
        flagged = [record.details["mismatch"] for record in standing.records if record.details.get("mismatch")]
        lines += [f"{name}: {mismatch}" for mismatch in flagged]
    return lines


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


def _named(arm: tuple[tuple[str, str], ...]) -> str:
    return " ".join(f"{OPS[op]} {backend}" for op, backend in arm)
