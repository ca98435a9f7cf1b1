"""Intervals hold what they promise, and "no difference" is said when there is none."""

import numpy as np
import pytest

from nvfp4lab.server.load import LoadRun, Request
from nvfp4lab.server.load_stats import Comparison, bootstrap, compare, throughput
from nvfp4lab.server.params import LoadShape

SHAPE = LoadShape(input_tokens=10, output_tokens=20)


def run(speed: float, generator: np.random.Generator, spread: float = 0.05, requests: int = 32, concurrency: int = 4) -> LoadRun:
    """A closed loop at about `speed` tokens per second, latencies spread by `spread`."""
    latency = concurrency * SHAPE.output_tokens / speed * generator.lognormal(0, spread, requests)
    made = tuple(Request(value / 10, value, SHAPE.output_tokens) for value in latency)
    return LoadRun(SHAPE, concurrency, float(latency.sum()) / concurrency, made, ())


def rounds(true: float, restart_spread: float, count: int, generator: np.random.Generator) -> list[LoadRun]:
    return [run(true * generator.lognormal(0, restart_spread), generator) for _ in range(count)]


def test_the_value_is_the_mean_of_the_rounds_and_lies_in_its_interval():
    made = rounds(100.0, 0.1, 4, np.random.default_rng(1))
    interval = throughput(made)
    assert interval.value == pytest.approx(np.mean([each.output_tok_s for each in made]))
    assert interval.low < interval.value < interval.high and interval.n == 4


@pytest.mark.parametrize("count", [2, 3, 5])
def test_equal_arms_are_called_different_in_at_most_one_of_twenty(count):
    """Restarts that differ by 5 % must not be taken for a difference of the arms."""
    generator = np.random.default_rng(7)
    trials = 60
    wrong = 0
    for trial in range(trials):
        one, other = rounds(100.0, 0.05, count, generator), rounds(100.0, 0.05, count, generator)
        wrong += compare(one, other, seed=trial).verdict is not Comparison.NO_DIFFERENCE
    assert wrong <= 0.05 * trials + 3  # 3: two standard deviations of 60 trials at 5 %


def test_a_real_difference_is_found_in_its_direction():
    generator = np.random.default_rng(3)
    slow, fast = rounds(100.0, 0.01, 4, generator), rounds(120.0, 0.01, 4, generator)
    assert compare(fast, slow).verdict is Comparison.FASTER
    assert compare(slow, fast).verdict is Comparison.SLOWER
    assert compare(fast, slow).ratio.value == pytest.approx(1.2, rel=0.05)


def test_one_start_shows_no_difference_however_large_the_ratio():
    generator = np.random.default_rng(3)
    compared = compare([run(200.0, generator)], [run(100.0, generator)])
    assert compared.verdict is Comparison.NO_DIFFERENCE and compared.why == "cannot be told: one start"


def test_a_sure_but_tiny_difference_is_no_difference():
    generator = np.random.default_rng(5)
    slow = [run(100.0, generator, spread=1e-4) for _ in range(6)]
    fast = [run(101.0, generator, spread=1e-4) for _ in range(6)]
    compared = compare(fast, slow)
    assert compared.verdict is Comparison.NO_DIFFERENCE and compared.why == "the same within 2%"


def test_what_cannot_be_told_is_not_called_the_same():
    generator = np.random.default_rng(5)
    compared = compare([run(100.0, generator), run(60.0, generator)], [run(100.0, generator), run(100.0, generator)])
    assert compared.verdict is Comparison.NO_DIFFERENCE and compared.why == "cannot be told: 2 starts differ too much"


@pytest.mark.parametrize("count", [2, 3])
def test_an_arms_own_interval_holds_its_true_speed(count):
    """The bootstrap of two or three starts holds it far less often than 95 % promises."""
    generator = np.random.default_rng(11)
    made = [rounds(100.0, 0.1, count, generator) for _ in range(60)]
    held = {
        name: sum(each.low <= 100.0 <= each.high for each in map(interval, made))
        for name, interval in (("bootstrap", bootstrap), ("throughput", throughput))
    }
    assert held["throughput"] >= 0.95 * 60 - 4 > held["bootstrap"]
