"""Distances, intervals and tests: against closed forms, full distributions and simulation."""

import math

import numpy as np
import pytest

from nvfp4lab.server.quality_distance import cut, is_sound, kl_nats, top1
from nvfp4lab.server.quality_stats import excess_p_value, mcnemar_p_value, mean_interval, wilson
from nvfp4lab.server.quality_symptoms import symptoms
from quality_stub import log_softmax


def merged(p: dict[int, float], q: dict[int, float]) -> float:
    """KL with everything unlisted in one bucket: valid, and weaker."""
    shared = p.keys() & q.keys()
    pairs = [(math.exp(p[token]), math.exp(q[token])) for token in shared]
    rest = (max(1 - sum(a for a, _ in pairs), 1e-300), max(1 - sum(b for _, b in pairs), 1e-12))
    return sum(a * math.log(a / b) for a, b in [*pairs, rest])


@pytest.mark.parametrize("seed", range(20))
def test_kl_is_a_lower_bound_and_tighter_than_one_bucket(seed: int) -> None:
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, 500)
    p, q = log_softmax(logits), log_softmax(logits + random.normal(0, (0.1, 3.0)[seed % 2], 500))
    exact = float(np.sum(np.exp(p) * (p - q)))
    ours = cut(dict(enumerate(p.tolist())), 64)
    for top in (3, 20, 400):
        theirs = cut(dict(enumerate(q.tolist())), top)
        assert merged(ours, theirs) - 1e-5 <= kl_nats(ours, theirs) <= exact + 1e-9  # c is found to 3e-6
    assert kl_nats(ours, cut(dict(enumerate(q.tolist())), 20)) > 0.25 * exact
    everything = kl_nats(dict(enumerate(p.tolist())), dict(enumerate(q.tolist())))
    assert everything == pytest.approx(exact, rel=1e-6)


def test_kl_of_equal_and_of_disjoint_rows() -> None:
    row = {1: math.log(0.7), 2: math.log(0.3)}
    disjoint = {8: math.log(0.999), 9: math.log(0.0005)}
    assert kl_nats(row, row) == pytest.approx(0.0, abs=1e-9)
    at_least = 0.7 * math.log(0.7 / 0.0005) + 0.3 * math.log(0.3 / 0.0005)  # neither token can have more than 0.0005
    assert kl_nats(row, disjoint) >= at_least > 6 and merged(row, disjoint) == pytest.approx(0.0, abs=1e-6)
    assert top1({4: -1.0, 3: -1.0, 9: -2.0}) == 3
    assert not is_sound(None) and not is_sound({}) and not is_sound({1: None}) and not is_sound({1: math.nan}) and is_sound(row)
    assert not is_sound({1: 0.5})  # a log-probability above 0 is none


def test_wilson_is_the_textbook_interval() -> None:
    interval = wilson(8, 10)
    assert (interval.low, interval.high) == (pytest.approx(0.4902, abs=1e-4), pytest.approx(0.9433, abs=1e-4))
    assert wilson(0, 5).low == 0.0 and wilson(5, 5).high == pytest.approx(1.0) and math.isnan(wilson(0, 0).value)


def test_mean_interval_covers_and_clusters_widen_it() -> None:
    random = np.random.default_rng(0)
    hits = 0
    for _ in range(200):
        shifts = np.repeat(random.normal(size=30), 8)
        values = 1.0 + shifts + 0.1 * random.normal(size=240)
        interval = mean_interval(values, np.repeat(np.arange(30), 8).tolist())
        hits += interval.low <= 1.0 <= interval.high
    assert 175 <= hits <= 200  # 95 % of 200, with 30 clusters a little less
    narrow = mean_interval(values, range(240))
    assert narrow.high - narrow.low < 0.6 * (interval.high - interval.low)


@pytest.mark.parametrize("clusters", [8, 40])
def test_excess_is_not_seen_where_there_is_none(clusters: int) -> None:
    """At the edge of H0 (values = margin * floor in the mean) small p-values are as rare as they say."""
    random = np.random.default_rng(clusters)
    names = np.repeat(np.arange(clusters), 6).tolist()
    small = 0
    for _ in range(200):
        floor = random.exponential(1.0, clusters * 6)
        values = 2.0 * random.exponential(1.0, clusters * 6)
        small += excess_p_value(values, floor, 2.0, names) < 0.01
    assert small <= 8  # 2 expected; binomial 99.9 % quantile is 8


def test_excess_is_seen_where_it_is_and_needs_clusters() -> None:
    random = np.random.default_rng(1)
    names = np.repeat(np.arange(20), 6).tolist()
    floor, values = random.exponential(1.0, 120), random.exponential(6.0, 120)
    assert excess_p_value(values, floor, 2.0, names) < 1e-3
    assert excess_p_value(values, floor, 2.0, ["one prompt"] * 120) == 1.0
    assert excess_p_value(floor, floor, 2.0, names) > 0.5
    assert excess_p_value([0.0] * 120, [0.0] * 120, 2.0, names) == 1.0


def test_mcnemar_is_the_binomial_tail() -> None:
    assert mcnemar_p_value(0, 0) == 1.0
    assert mcnemar_p_value(3, 0) == 1 / 8
    assert mcnemar_p_value(10, 0) == 1 / 1024
    assert mcnemar_p_value(2, 2) == pytest.approx(11 / 16)


def test_symptoms_of_answers() -> None:
    fine = symptoms([5, 6, 7, 8, 9], "fine \ufffd")  # the last character was cut by the token limit
    assert (fine.token_zero_run, fine.same_token_run, fine.replacement_characters, fine.repetition) == (0, 1, 0, 0.0)
    bad = symptoms([0, 0, 0, 0, 5, 5, 5], "\ufffd!!!!")
    assert (bad.token_zero_run, bad.same_token_run, bad.replacement_characters) == (4, 4, 1)
    assert symptoms([1, 2, 3, 4] * 5, "x").repetition == pytest.approx(13 / 17)
    assert symptoms([], "").tokens == 0
