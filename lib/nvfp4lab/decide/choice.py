"""Which backends to name: the fastest arm that was right. Speeds are compared only between arms that served the same model."""

from collections.abc import Sequence

from nvfp4lab.decide.question import OPS, Question, backends_of, model_of
from nvfp4lab.decide.standing import BAD, Standing, overlap, throughput
from nvfp4lab.records import Evidence, Number, Verdict

Arm = tuple[tuple[str, str], ...]  # ((op, backend), ...), sorted
Choice = tuple[dict[str, str], str, tuple[str, ...]]


def choose(question: Question, by_backend: Sequence[Standing], ours: Sequence[Evidence], moot: frozenset[str]) -> Choice:
    """({op: backend}, why, combinations with no measurable difference). Empty when the evidence does not carry a choice."""
    right = {(s.op, s.backend) for s in by_backend if s.verdict is Verdict.OK}
    arms: dict[Arm, list[Evidence]] = {}
    for record in ours:
        named = {op: backend for op, backend in backends_of(record).items() if op not in moot}
        if named and record.stage in ("server", "load") and record.verdict is not Verdict.NOT_RUN:
            arms.setdefault(tuple(sorted(named.items())), []).append(record)
    sound = {arm: about for arm, about in arms.items() if set(arm) <= right and not any(record.verdict in BAD for record in about)}
    if sound:
        return _over_models(question, sound)
    ops = [op for op in OPS if op not in moot]
    choice = {op: next((s.backend for s in by_backend if s.op == op and s.verdict is Verdict.OK), None) for op in ops}
    known = {op: backend for op, backend in choice.items() if backend}
    if known and len(known) == len([op for op in ops if any(s.op == op for s in by_backend)]):
        if tuple(sorted(known.items())) in arms:
            return {}, f"{_named(tuple(sorted(known.items())))}: right in part, but a server with these flags failed", ()
        return known, "kernels measured right on this GPU; no server was started with these flags yet", ()
    return {}, _what_is_missing(by_backend, ours), ()


def _over_models(question: Question, sound: dict[Arm, list[Evidence]]) -> Choice:
    """The model that is asked about if it was served; else the best for each model, joined where they name different ops."""
    models = dict.fromkeys(model_of(record) for about in sound.values() for record in about)
    if question.model in models:
        models = {question.model: None}
    choices = {}
    for model in models:
        served = {arm: kept for arm, about in sound.items() if (kept := [r for r in about if model_of(r) == model])}
        choices[model] = _fastest(served)
    if len(choices) == 1:
        return next(iter(choices.values()))
    joined: dict[str, str] = {}
    reasons, ties = [], []
    for model, (combination, why, same) in sorted(choices.items(), key=lambda item: -len(item[1][0])):
        if new := {op: backend for op, backend in combination.items() if op not in joined}:
            joined |= new
            reasons.append(f"{_named(tuple(sorted(new.items())))} with {model or 'a model without a name'}: {why}")
            ties += same
    together = "; these were not measured together" if len(reasons) > 1 else ""
    return joined, "; ".join(reasons) + together, tuple(ties)


def _fastest(sound: dict[Arm, list[Evidence]]) -> Choice:
    speeds: dict[Arm, Number] = {arm: number for arm, about in sound.items() if (number := throughput(about))}
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


def _named(arm: Arm) -> str:
    return " ".join(f"{OPS[op]} {backend}" for op, backend in arm)
