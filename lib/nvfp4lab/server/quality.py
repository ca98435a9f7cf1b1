"""Does an arm answer as its model should? Judged token by token against a reference, relative to NVFP4's own loss.

    ref = reference(bf16_dir, prompts_for(bf16_dir))
    floor = floor_of(ref, dequantised_dir)
    finding = judge(server.url, ref, floor, concurrency=8)

Each prompt is asked four times: scored and continued alone, continued alone once more (determinism), and both again at
`concurrency`. Scoring runs prefill kernels, continuing runs decode kernels at small M; a backend may break either.
A continued answer counts up to and including its first token that differs from the reference's: later ones have
another context.

`degraded` is a statistical statement: in one of the groups prefill, decode, concurrent and long context, the mean KL (or the
share of other top-1 tokens) exceeds MARGIN times the floor's, at ALPHA over all tests together, by a sign-flip test over
prompts. MARGIN leaves room for what a correct kernel may add: another order of sums, activations rounded to FP4.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from nvfp4lab.records import Number, WrongKind
from nvfp4lab.server import quality_client as client
from nvfp4lab.server.arms_judge import Finding
from nvfp4lab.server.quality_canary import Canary
from nvfp4lab.server.quality_client import Continuation
from nvfp4lab.server.quality_distance import Row, is_sound, kl_nats, top1
from nvfp4lab.server.quality_reference import Floor, Item, Reference, floor_of, load_reference, prompts_for, reference
from nvfp4lab.server.quality_stats import Interval, excess_p_value, mcnemar_p_value, mean_interval, wilson
from nvfp4lab.server.quality_symptoms import REPEATED_RUN, TOKEN_ZERO_RUN, Symptoms, symptoms

__all__ = ["Canary", "Floor", "Reference", "floor_of", "judge", "load_reference", "prompts_for", "reference"]

MARGIN = 2.0
ALPHA = 1e-3
GROUPS = ("prefill", "decode", "concurrent", "long")
_LONG_CLUSTER_TOKENS = 4  # a long prompt is several clusters, or three prompts could never prove anything


@dataclasses.dataclass(frozen=True)
class Answers:
    """All that one arm said to one item."""

    scored: tuple[Row | None, ...]
    alone: Continuation
    again: Continuation
    scored_concurrent: tuple[Row | None, ...]
    concurrent: Continuation


@dataclasses.dataclass(frozen=True)
class Point:
    """One compared position."""

    group: str
    cluster: str
    kl_nats: float
    floor_kl_nats: float
    differs: bool
    floor_differs: bool


def judge(base_url: str, ref: Reference, floor: Floor, concurrency: int) -> Finding:
    """Ask the server at `base_url` everything and judge it.

    Raises requests' errors when it is gone, LabError when its replies cannot be read.
    """
    return judge_answers(ref, floor, ask(base_url, ref, concurrency), concurrency)


def ask(base_url: str, ref: Reference, concurrency: int) -> list[Answers]:
    """Every item alone, alone again, and `concurrency` at a time."""

    cap = max(len(item.answer_ids) for item in ref.items)  # the same for all: an arm that does not stop shows in the length

    def scored(item: Item) -> tuple[Row | None, ...]:
        return client.score(base_url, item.prompt.token_ids, item.answer_ids)

    def continued(item: Item) -> Continuation:
        return client.continue_greedily(base_url, item.prompt.token_ids, cap)

    alone = [(scored(item), continued(item), continued(item)) for item in ref.items]
    together = zip(
        client.in_parallel(scored, ref.items, concurrency), client.in_parallel(continued, ref.items, concurrency), strict=True
    )
    return [Answers(*one, *other) for one, other in zip(alone, together, strict=True)]


def judge_answers(ref: Reference, floor: Floor, answers: Sequence[Answers], concurrency: int) -> Finding:
    """The finding of what was answered; no server needed."""
    points = [point for number, given in enumerate(answers) for point in _points(ref.items[number], floor, number, given)]
    theirs = [symptoms(item.answer_ids, item.answer_text) for item in ref.items]
    ours = [_worst(given, item) for given, item in zip(answers, ref.items, strict=True)]
    unsound = sum(map(_unsound, answers))
    tests = _tests(points)
    kind, reason = _verdict(unsound, ours, theirs, tests, points)
    numbers = (
        Number("unsound_positions", unsound, "1", n=len(points)),
        *_distances(points),
        *_symptom_numbers(ours, theirs),
        *_stability(answers),
        Number("concurrency", concurrency, "1"),
    )
    samples = [
        {"prompt": item.prompt.name, "reference": item.answer_text, "arm": given.alone.text}
        for item, given in zip(ref.items, answers, strict=True)
    ]
    return Finding(kind, reason, numbers, {"p_values": tests, "margin": MARGIN, "alpha": ALPHA, "samples": samples[:8]})


def _points(item: Item, floor: Floor, number: int, given: Answers) -> Iterable[Point]:
    passes = (
        ("prefill", given.scored, 0, len(item.rows)),
        ("decode", given.alone.rows, 1, _comparable(item, given.alone)),
        ("concurrent", given.scored_concurrent, 0, len(item.rows)),
        ("concurrent", given.concurrent.rows, 1, _comparable(item, given.concurrent)),
    )
    for group, rows, start, stop in passes:
        for position in range(start, min(stop, len(rows))):
            row = rows[position]
            if is_sound(row):
                is_long = item.prompt.category == "long"
                part = f"#{position // _LONG_CLUSTER_TOKENS}" if is_long else ""
                expected = item.rows[position]
                yield Point(
                    group="long" if is_long else group,
                    cluster=f"{item.prompt.name}{part}",
                    kl_nats=kl_nats(expected, row),
                    floor_kl_nats=floor.kl_nats[number][position],
                    differs=top1(row) != top1(expected),
                    floor_differs=not floor.agrees[number][position],
                )


def _comparable(item: Item, given: Continuation) -> int:
    """How many leading positions of a continued answer have the reference's context."""
    same = 0
    for expected, token in zip(item.answer_ids, given.token_ids, strict=False):
        if expected != token:
            break
        same += 1
    return min(same + 1, len(item.answer_ids))


def _unsound(given: Answers) -> int:
    rows = (*given.scored, *given.alone.rows, *given.again.rows, *given.scored_concurrent, *given.concurrent.rows)
    return sum(not is_sound(row) for row in rows)


def _tests(points: Sequence[Point]) -> dict[str, float]:
    """p-values by "group: metric", of the groups that have points."""
    result = {}
    for group in GROUPS:
        mine = [point for point in points if point.group == group]
        clusters = [point.cluster for point in mine]
        if mine:
            kl, floor_kl = [point.kl_nats for point in mine], [point.floor_kl_nats for point in mine]
            result[f"{group}: KL"] = excess_p_value(kl, floor_kl, MARGIN, clusters)
            differs, floor_differs = [point.differs for point in mine], [point.floor_differs for point in mine]
            result[f"{group}: top-1"] = excess_p_value(differs, floor_differs, MARGIN, clusters)
    return result


def _verdict(
    unsound: int, ours: Sequence[Symptoms], theirs: Sequence[Symptoms], tests: Mapping[str, float], points: Sequence[Point]
) -> tuple[WrongKind | None, str]:
    if unsound:
        return WrongKind.NAN, f"{unsound} positions with null or non-finite log-probabilities"
    runs = sum(a.token_zero_run >= TOKEN_ZERO_RUN > b.token_zero_run for a, b in zip(ours, theirs, strict=True))
    if runs:
        return (
            WrongKind.GARBAGE,
            f"{runs} of {len(ours)} answers have a run of token id 0, which argmax gives for all-equal or NaN logits",
        )
    pairs = {
        "repeat one token": [
            (a.same_token_run >= REPEATED_RUN, b.same_token_run >= REPEATED_RUN) for a, b in zip(ours, theirs, strict=True)
        ],
        "contain U+FFFD": [(a.replacement_characters > 0, b.replacement_characters > 0) for a, b in zip(ours, theirs, strict=True)],
    }
    for what, flags in pairs.items():
        only_ours, only_theirs = sum(a and not b for a, b in flags), sum(b and not a for a, b in flags)
        if mcnemar_p_value(only_ours, only_theirs) < ALPHA:
            return WrongKind.GARBAGE, f"{only_ours} of {len(flags)} answers {what} where the reference's do not"
    worst = min(tests, key=tests.__getitem__, default=None)
    if worst and tests[worst] < ALPHA / len(tests):
        how = f"p = {tests[worst]:.1g}, {len(tests)} tests"
        return WrongKind.DEGRADED, f"{worst} is more than {MARGIN:g} times NVFP4's own loss ({how})"
    clusters = max((len({point.cluster for point in points if point.group == group}) for group in GROUPS), default=0)
    if 0.5**clusters >= ALPHA / max(1, len(tests)):
        return None, f"nothing wrong was seen, but {clusters} prompts are too few to prove a degradation"
    return None, ""


def _distances(points: Sequence[Point]) -> Iterable[Number]:
    for group in GROUPS:
        mine = [point for point in points if point.group == group]
        if mine:
            clusters = [point.cluster for point in mine]
            yield _number(f"kl_{group}", "nat", mean_interval([point.kl_nats for point in mine], clusters))
            yield _number(f"floor_kl_{group}", "nat", mean_interval([point.floor_kl_nats for point in mine], clusters))
            yield _number(f"top1_agreement_{group}", "1", wilson(sum(not point.differs for point in mine), len(mine)))
            yield _number(f"floor_top1_agreement_{group}", "1", wilson(sum(not point.floor_differs for point in mine), len(mine)))


def _worst(given: Answers, item: Item) -> Symptoms:
    """The worst of an item's continued answers, sign by sign; length and repetition of the first."""
    seen = [symptoms(answer.token_ids, answer.text) for answer in (given.alone, given.again, given.concurrent)]
    return dataclasses.replace(
        seen[0],
        token_zero_run=max(one.token_zero_run for one in seen),
        same_token_run=max(one.same_token_run for one in seen),
        replacement_characters=max(one.replacement_characters for one in seen),
    )


def _symptom_numbers(ours: Sequence[Symptoms], theirs: Sequence[Symptoms]) -> Iterable[Number]:
    names = range(len(ours))
    drift = [a.tokens - b.tokens for a, b in zip(ours, theirs, strict=True)]
    repetition = [a.repetition - b.repetition for a, b in zip(ours, theirs, strict=True)]
    yield Number("answers_with_token_zero_run", sum(one.token_zero_run >= TOKEN_ZERO_RUN for one in ours), "1", n=len(ours))
    yield Number("answers_with_replacement_character", sum(one.replacement_characters > 0 for one in ours), "1", n=len(ours))
    yield _number("repetition_over_reference", "1", mean_interval(repetition, names))
    yield _number("length_over_reference", "token", mean_interval(drift, names))


def _stability(answers: Sequence[Answers]) -> Iterable[Number]:
    again = sum(given.alone.token_ids == given.again.token_ids for given in answers)
    together = sum(given.alone.token_ids == given.concurrent.token_ids for given in answers)
    yield _number("same_answer_twice", "1", wilson(again, len(answers)))
    yield _number("same_answer_at_concurrency", "1", wilson(together, len(answers)))


def _number(name: str, unit: str, interval: Interval) -> Number:
    return Number(name, interval.value, unit, interval.low, interval.high, interval.n)
