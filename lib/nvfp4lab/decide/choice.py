"""Which backends to name: the fastest arm that was right; without any server the fastest kernels, and said so.

Speeds of servers are compared only between arms that served the same model. Evidence from kernels alone never outranks a
server's: where one server was right, kernels are cited beside it and choose nothing.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from nvfp4lab.decide import speeds
from nvfp4lab.decide.attribution import Attribution
from nvfp4lab.decide.question import OPS, Question, model_of
from nvfp4lab.decide.speeds import Ranking
from nvfp4lab.decide.standing import Standing, doubt
from nvfp4lab.records import BAD, Evidence, Verdict
from nvfp4lab.report.digits import interval

Arm = tuple[tuple[str, str], ...]  # ((op, backend), ...), sorted
Arms = Mapping[Arm, Sequence[Evidence]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """backends: by op, empty when the evidence does not carry a choice. ties: combinations with no measurable difference.

    from_kernels: nothing but kernels was measured. records: the server records it rests on; () from kernels.
    """

    backends: Mapping[str, str]
    why: str
    ties: tuple[str, ...] = ()
    from_kernels: bool = False
    records: tuple[Evidence, ...] = ()


def choose(
    question: Question, by_backend: Sequence[Standing], ours: Sequence[Evidence], attribution: Attribution, moot: frozenset[str]
) -> Choice:
    """The choice that the evidence carries. `by_backend`: standings of the ops that are not moot."""
    concrete = [standing for standing in by_backend if standing.alias_of is None]
    right = {(s.op, s.backend): s for s in concrete if s.verdict is Verdict.OK}
    arms: dict[Arm, list[Evidence]] = {}
    for record in ours:
        named = {op: backend for op, backend in attribution.named(record).items() if op not in moot}
        if named and record.stage in ("server", "load") and record.verdict is not Verdict.NOT_RUN:
            arms.setdefault(tuple(sorted(named.items())), []).append(record)
    failed = {arm for arm, about in arms.items() if any(r.verdict in BAD or r.verdict is Verdict.UNSUPPORTED for r in about)}
    sound = {arm: about for arm, about in arms.items() if set(arm) <= right.keys() and arm not in failed}
    if sound:
        disputed = {pair for pair, standing in right.items() if standing.disputed}
        return _over_models(question, sound, disputed)
    if any(standing.verdict is Verdict.OK for standing in concrete):
        return _of_kernels(concrete, failed)
    return Choice({}, _what_is_missing(concrete, ours))


def kernel_ranking(by_backend: Sequence[Standing], op: str) -> Ranking:
    """The backends of `op` whose kernels were right, by their kernels' times."""
    right = [
        standing for standing in by_backend if standing.op == op and standing.alias_of is None and standing.verdict is Verdict.OK
    ]
    return speeds.of_kernels({standing.backend: standing.records for standing in right})


def ranked_words(ranking: Ranking) -> str:
    """A ranking of kernels in one sentence."""
    best = ranking.speeds[ranking.best]
    only = len(ranking.speeds) == 1
    others = [f"{name} {interval(number)}" for name, number in ranking.speeds.items() if name != ranking.best]
    told = [f"{ranking.best} {'is the only one timed' if only else 'is the fastest'}: {interval(best)} over {ranking.where}"]
    told += [f"beside {', '.join(others)}"] if others else []
    told += [f"no difference to {', '.join(ranking.ties)}"] if ranking.ties else []
    told += ranking.remarks
    told += [f"{name} was timed on other cases, or in another way, only" for name in ranking.apart]
    return "; ".join(told)


def _over_models(question: Question, sound: Arms, disputed: set[tuple[str, str]]) -> Choice:
    """The model that is asked about if it was served; else the best for each model, joined where they name different ops."""
    models = dict.fromkeys(model_of(record) for about in sound.values() for record in about)
    if question.model in models:
        models = {question.model: None}
    choices = {}
    for model in models:
        served = {arm: kept for arm, about in sound.items() if (kept := [r for r in about if model_of(r) == model])}
        undisputed = {arm: about for arm, about in served.items() if not set(arm) & disputed}
        choices[model] = _fastest(question, undisputed or served)
    if len(choices) == 1:
        return next(iter(choices.values()))
    joined: dict[str, str] = {}
    reasons, ties, records = [], [], []
    for model, choice in sorted(choices.items(), key=lambda item: -len(item[1].backends)):
        if new := {op: backend for op, backend in choice.backends.items() if op not in joined}:
            joined |= new
            reasons.append(f"{_named(new)} with {model or 'a model without a name'}: {choice.why}")
            ties += choice.ties
            records += choice.records
    together = "; these were not measured together" if len(reasons) > 1 else ""
    return Choice(joined, "; ".join(reasons) + together, tuple(ties), records=tuple(records))


def _fastest(question: Question, sound: Arms) -> Choice:
    ranking = speeds.of_servers(sound, question.tp, lambda arm: _named(dict(arm)))
    if ranking.best is None:
        best = max(sound, key=lambda arm: (len(arm), len(sound[arm])))
        others = [_named(dict(arm)) for arm in sound if arm != best]
        tail = f", so nothing says that it is faster than {', '.join(others)}" if others else " to rank it"
        why = f"the server answered right with these flags; no sound speed was measured{tail}"
        return Choice(dict(best), why, records=tuple(sound[best]))
    ties = tuple(_named(dict(arm)) for arm in ranking.ties)
    fastest = "the fastest measured" if len(ranking.speeds) > 1 else "the only one with a sound speed"
    told = [f"right, and {fastest}: {interval(ranking.speeds[ranking.best])} at {ranking.where}"]
    told += [f"no difference to {', '.join(ties)}"] if ties else []
    told += ranking.remarks
    slow = [arm for arm in sound if arm not in ranking.speeds]
    told += [f"right, but not measured at this load: {', '.join(_named(dict(arm)) for arm in slow)}"] if slow else []
    return Choice(dict(ranking.best), "; ".join(told), ties, records=tuple(sound[ranking.best]))


def _of_kernels(by_backend: Sequence[Standing], failed: set[Arm]) -> Choice:
    """The fastest right kernel of each op. Every op that evidence speaks of needs one: half a configuration is none."""
    chosen, told, missing, ties = {}, [], [], []
    for op in dict.fromkeys(standing.op for standing in by_backend):
        backend, why, same = _kernel_of(op, by_backend)
        ties += [f"{OPS[op]} {name}" for name in same]
        if backend:
            chosen[op] = backend
            told.append(f"{op}: {why}")
        else:
            missing.append(f"{op}: {why}")
    if missing:
        return Choice({}, "; ".join([*missing, *told]))
    if any(set(arm) <= set(chosen.items()) for arm in failed):
        return Choice({}, f"{_named(chosen)}: right in part, but a server with these flags failed")
    preface = "kernels only, no server was judged right with these flags yet"
    return Choice(chosen, f"{preface}. {'; '.join(told)}", tuple(ties), from_kernels=True)


def _kernel_of(op: str, by_backend: Sequence[Standing]) -> tuple[str | None, str, tuple[str, ...]]:
    """(backend or None, why, backends that cannot be told apart from it)."""
    right = [standing for standing in by_backend if standing.op == op and standing.verdict is Verdict.OK]
    if not right:
        return None, "no backend was measured right here", ()
    undisputed = [standing for standing in right if not standing.disputed]
    trusted = [standing for standing in undisputed if not standing.less_exact] or undisputed or right
    ranking = kernel_ranking(trusted, op)
    untimed = [standing.backend for standing in trusted if standing.backend not in (*ranking.speeds, *ranking.apart)]
    doubts = [s.disputed or s.less_exact for s in trusted if s.backend == (ranking.best or s.backend)]
    tail = f"; but {doubt(doubts[0])}" if doubts and doubts[0] else ""
    if ranking.best:
        tail += f"; right, but not timed: {', '.join(untimed)}" if untimed else ""
        return ranking.best, ranked_words(ranking) + tail, ranking.ties
    if len(trusted) == 1:
        return trusted[0].backend, f"{trusted[0].backend} is the only one whose kernel was right; it was not timed{tail}", ()
    return None, f"right, but not timed, so that none can be preferred: {', '.join(untimed)}", ()


def _what_is_missing(by_backend: Sequence[Standing], ours: Sequence[Evidence]) -> str:
    if not by_backend:
        return "no evidence: nothing was read or run for this stack and GPU"
    if not any(record.stage in ("kernel", "server", "load") and record.verdict is not Verdict.NOT_RUN for record in ours):
        open_ones = [f"{s.op} {s.backend}" for s in by_backend if s.verdict is Verdict.NOT_RUN]
        left = ", ".join(open_ones) or "nothing"
        return f"nothing was run on this GPU with this stack; source reading leaves open: {left}. The rest needs a card"
    lacking = [op for op in OPS if any(s.op == op for s in by_backend)]
    return f"no backend was measured right for {', '.join(lacking)}"


def _named(backends: Mapping[str, str]) -> str:
    return " ".join(f"{OPS[op]} {backend}" for op, backend in sorted(backends.items()))
