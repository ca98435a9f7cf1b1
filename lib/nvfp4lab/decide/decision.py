"""The choice: fastest of what was measured right on this stack and GPU. No evidence, no recommendation."""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

from nvfp4lab.decide import reasons
from nvfp4lab.decide.attribution import attribute
from nvfp4lab.decide.choice import Choice, choose, kernel_ranking, ranked_words
from nvfp4lab.decide.question import OPS, Question, last_word, partition
from nvfp4lab.decide.reasons import Rejected
from nvfp4lab.decide.speeds import gpu_of
from nvfp4lab.decide.standing import BASIS, NOT_FOR_EVERY_SHAPE, Confidence, Standing, doubt, kernel_failures, standings
from nvfp4lab.field_reports import FieldReport
from nvfp4lab.records import Evidence, Stack, Verdict

EXPIRES: dict[str, str] = {
    "sglang": "routes, server arms and the choice itself",
    "flashinfer": "kernel verdicts, speeds and server arms",
    "kernel_package": "Marlin and SGLang's own kernels",
    "cuda": "every compiled kernel",
    "cudnn": "what flashinfer_cudnn runs",
    "driver": "speeds and crashes",
}


@dataclasses.dataclass(frozen=True)
class Decision:
    """What to launch and why. command None: nothing can be recommended, and `why` says what is missing.

    chosen: backend by op; evidence: the records behind it. no_difference: combinations whose speed cannot be told apart from
    the chosen one's. beside: what kernels say where a server decided, and with which further flags it was served.
    autos: what `auto` is here. reports: what `rejected` cites by id: others' machines, which decide nothing here.
    expires_with: {version name: {"now": value, "invalidates": what}}.
    """

    question: Question
    command: str | None
    chosen: dict[str, str]
    why: str
    confidence: str | None
    evidence: tuple[str, ...]
    beside: tuple[str, ...]
    autos: tuple[str, ...]
    rejected: tuple[Rejected, ...]
    reports: tuple[FieldReport, ...]
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
            "reports": [dataclasses.asdict(report) for report in self.reports],
        }


def decide(question: Question, records: Sequence[Evidence]) -> Decision:
    """Join all records into one decision for `question`."""
    ours, foreign = partition(question, last_word(records))
    attribution = attribute(ours)
    moot = _moot(question, records)
    by_backend = [standing for standing in standings(ours, attribution) if standing.op not in moot]
    choice = choose(question, by_backend, ours, attribution, moot)
    picked = [s for s in by_backend if choice.backends.get(s.op) == s.backend]
    return Decision(
        question=question,
        command=_command(question, choice) if choice.backends else None,
        chosen=dict(choice.backends),
        why=choice.why,
        confidence=_confidence(choice, picked),
        evidence=tuple(line for standing in picked for line in reasons.cited(standing)),
        beside=(*_beside(choice, by_backend), *_mixed(ours)),
        autos=tuple(auto.line for op, auto in attribution.autos.items() if op not in moot),
        rejected=reasons.rejected(by_backend, question, choice, attribution),
        reports=reasons.reports(by_backend, question),
        contradictions=reasons.contradictions(by_backend, ours, attribution),
        no_difference=choice.ties,
        moot=tuple(f"{OPS[op]} touches no layer of this checkpoint" for op in sorted(moot)),
        expires_with=_expires(question, ours),
        other_stacks=len(foreign),
        standings=tuple(by_backend),
    )


def _confidence(choice: Choice, picked: Sequence[Standing]) -> str | None:
    """Confidence of the choice: it is only made from what was measured."""
    if not choice.backends:
        return None
    if choice.from_kernels:
        return f"{Confidence.MEASURED} (kernels only, not a server)"
    right = [r for s in picked for r in s.records if r.verdict is Verdict.OK and BASIS.get(r.stage) is Confidence.MEASURED]
    disputed = "; disputed by its own kernels, see the contradictions" if any(s.disputed for s in picked) else ""
    return f"{Confidence.MEASURED} ({', '.join(sorted({record.stage for record in right}))}){disputed}"


def _beside(choice: Choice, by_backend: Sequence[Standing]) -> tuple[str, ...]:
    """Where servers decided: what kernels alone would say, and with which further flags the chosen arms were served."""
    if not choice.backends or choice.from_kernels:
        return ()
    rankings = {op: kernel_ranking(by_backend, op) for op in choice.backends}
    lines = [f"kernels alone, {op}: {ranked_words(ranking)}" for op, ranking in rankings.items() if ranking.best]
    for op in choice.backends:
        picked = next(s for s in by_backend if s.op == op and s.backend == choice.backends[op])
        kernels = [record for record in picked.records if record.stage == "kernel" and record.verdict is not Verdict.NOT_RUN]
        lines += [f"kernel records of {op} {picked.backend} here: {_counted(kernels)}"] if kernels else []
        lines += [f"its kernel is less exact than some probes ask: {doubt(picked.less_exact)}"] if picked.less_exact else []
        lines += [unsteady for record in picked.records if (unsteady := _unsteady(record))]
    left_out = [op for op in OPS if op not in choice.backends and any(s.op == op for s in by_backend)]
    lines += [
        f"{OPS[op]} is left out: no server was judged right for that op, so this is for a model without it" for op in left_out
    ]
    judged, loaded = (
        dict.fromkeys(flags for record in choice.records if record.stage == stage and (flags := _further_flags(record)))
        for stage in ("server", "load")
    )
    lines += [f"the server was judged with {flags}" for flags in judged]
    return (*lines, *(f"under load alone it was seen with {flags}" for flags in loaded if flags not in judged))


def _counted(kernels: Sequence[Evidence]) -> str:
    """How many were right, and what became of each of the rest."""
    failures = kernel_failures(kernels, judged_right=True)
    refused = Counter(str(record.verdict) for record in kernels if record.verdict in NOT_FOR_EVERY_SHAPE)
    rest = {"failed": len(failures.decisive + failures.disputed), "less exact than asked": len(failures.less_exact), **refused}
    right = sum(record.verdict is Verdict.OK for record in kernels)
    return ", ".join([f"{right} of {len(kernels)} right", *(f"{count} {what}" for what, count in rest.items() if count)])


def _unsteady(record: Evidence) -> str | None:
    """That a served arm gives the same question, asked alone, different greedy answers; None where it does not."""
    alike = record.number("same_answer_twice")
    if record.stage != "server" or alike is None or alike.value == 1.0:
        return None
    arm = record.subject.removeprefix("arm:")
    differing = f"{1 - alike.value:.0%} of {alike.n} greedy answers"
    return f"arm {arm} is not deterministic: {differing} differed when asked twice, one at a time"


def _mixed(ours: Sequence[Evidence]) -> tuple[str, ...]:
    """Where what was measured comes from several products of one capability, or from versions left open in the question:
    speeds are compared within one product, verdicts are joined, and that is said."""
    measured = [record for record in ours if BASIS.get(record.stage) is Confidence.MEASURED]
    kinds = {
        "kinds of GPU": {gpu_of(record) for record in measured},
        "versions of SGLang": {record.stack.sglang for record in measured},
        "versions of FlashInfer": {record.stack.flashinfer for record in measured},
    }
    found = {what: sorted(filter(None, names)) for what, names in kinds.items()}
    return tuple(f"the evidence comes from {len(n)} {what}: {', '.join(n)}" for what, n in found.items() if len(n) > 1)


def _further_flags(record: Evidence) -> str:
    """Flags of a served arm beyond its backends, as on the command line."""
    arm = record.details.get("arm")
    if not isinstance(arm, dict):
        return ""
    names = {"quantization": "--quantization", "moe_a2a_backend": "--moe-a2a-backend", "attention_backend": "--attention-backend"}
    sizes = {"tp": "--tp-size", "ep": "--ep-size", "dp": "--dp-size"}
    given = [f"{flag} {arm[name]}" for name, flag in (names | sizes).items() if arm.get(name)]
    given += [f"speculation {arm['speculation']}"] if arm.get("speculation") else []
    given += [f"{name}={value}" for name, value in (arm.get("env") or {}).items()]
    return " ".join([*given, *map(str, arm.get("flags") or ())])


def _moot(question: Question, records: Sequence[Evidence]) -> frozenset[str]:
    """Ops that touch no FP4 layer: of the checkpoint asked about where it was audited, else of every audited one."""
    audits = [record for record in records if record.stage == "checkpoint" and "moot_flags" in record.details]
    of_model = [record for record in audits if record.subject == f"checkpoint:{question.model}"]
    return frozenset(op for op in OPS if audits and all(_is_moot(op, record) for record in of_model or audits))


def _is_moot(op: str, audit: Evidence) -> bool:
    flags = set(audit.details["moot_flags"])
    flag = OPS[op]
    return bool(flags & {flag, flag.strip("-").replace("-", "_"), op})


def _command(question: Question, choice: Choice) -> str:
    flags = " ".join(f"{flag} {choice.backends[op]}" for op, flag in OPS.items() if op in choice.backends)
    served = {record.details["arm"].get("tp", 1) for record in choice.records if isinstance(record.details.get("arm"), dict)}
    size = served.pop() if question.tp == 1 and len(served) == 1 else question.tp
    tp = f" --tp {size}" if size > 1 else ""
    quantization = f" --quantization {question.quantization_flag}" if question.quantization_flag else ""
    return f"python -m sglang.launch_server --model-path {question.model}{tp}{quantization} {flags}"


def _expires(question: Question, ours: Sequence[Evidence]) -> dict[str, Any]:
    stack = next((record.stack for record in reversed(ours) if record.stage in ("server", "load", "kernel")), Stack())
    now = {name: getattr(stack, name) or getattr(question, name, None) for name in EXPIRES}
    return {name: {"now": value, "invalidates": EXPIRES[name]} for name, value in now.items() if value}
