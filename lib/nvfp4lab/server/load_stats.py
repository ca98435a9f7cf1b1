"""How sure a throughput is, and whether two arms differ: a bootstrap over restarts and requests, paired by round.

A restart changes more than a request does (memory layout, clocks, autotuning), so restarts are resampled first, requests
inside them second. With few restarts a bootstrap is known to be too narrow (of two it is hardly more than their range); a
Student interval over the logarithms of the rounds is computed as well and the wider one is used. One restart cannot tell an
arm from its restart: that is "no difference", and so is an interval too wide to tell, which `why` says.
"""

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from nvfp4lab.server.load import LoadRun

RESAMPLES = 2000
MARGIN = 0.02  # two arms nearer than this are not worth telling apart, however sure the sign is
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; 1.96 beyond.
STUDENT_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


class Comparison(enum.StrEnum):
    """What can be said about an arm beside another."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no difference"


@dataclasses.dataclass(frozen=True)
class Interval:
    """A value with its 95 % interval; n: restarts behind it."""

    value: float
    low: float
    high: float
    n: int


@dataclasses.dataclass(frozen=True)
class Compared:
    """ratio: arm over reference in output tokens per second. why: what the verdict rests on."""

    verdict: Comparison
    ratio: Interval
    why: str


def throughput(runs: Sequence[LoadRun], seed: int = 0) -> Interval:
    """Output tokens per second of one arm over its restarts; needs at least one run. Of one run it is that of its requests."""
    boot = bootstrap(runs, seed)
    logs = np.log([run.output_tok_s for run in runs])
    factor = float(np.exp(student_half_width(logs)))
    middle = float(np.exp(logs.mean()))
    return dataclasses.replace(boot, low=min(boot.low, middle / factor), high=max(boot.high, middle * factor))


def bootstrap(runs: Sequence[LoadRun], seed: int = 0) -> Interval:
    """The same by resampling alone."""
    samples = _resampled(runs, np.random.default_rng(seed))
    rounds = np.random.default_rng(seed + 1).integers(len(runs), size=(RESAMPLES, len(runs)))
    means = np.take_along_axis(samples, rounds, axis=1).mean(axis=1)
    value = float(np.mean([run.output_tok_s for run in runs]))
    low, high = (float(bound) for bound in np.quantile(means, (0.025, 0.975)))
    return Interval(value, min(low, value), max(high, value), len(runs))


def compare(runs: Sequence[LoadRun], reference: Sequence[LoadRun], seed: int = 0) -> Compared:
    """Whether an arm is faster than the reference; runs are paired by round (both lists in the order of rounds)."""
    logs = np.log([run.output_tok_s / other.output_tok_s for run, other in zip(runs, reference, strict=True)])
    generator = np.random.default_rng(seed)
    both = np.log(_resampled(runs, generator)) - np.log(_resampled(reference, generator))
    rounds = generator.integers(len(logs), size=(RESAMPLES, len(logs)))
    low, high = np.quantile(np.take_along_axis(both, rounds, axis=1).mean(axis=1), (0.025, 0.975))
    mean, half = float(logs.mean()), student_half_width(logs)
    ratio = Interval(*(float(np.exp(x)) for x in (mean, min(low, mean - half), max(high, mean + half))), len(logs))
    return _judged(ratio)


def student_half_width(values: np.ndarray) -> float:
    """Half the 95 % interval of a mean; 0 for one value, whose spread is unknown."""
    if len(values) < 2:
        return 0.0
    quantile = STUDENT_95[len(values) - 2] if len(values) - 2 < len(STUDENT_95) else 1.96
    return float(quantile * values.std(ddof=1) / len(values) ** 0.5)


def _judged(ratio: Interval) -> Compared:
    if ratio.n < 2:
        return Compared(Comparison.NO_DIFFERENCE, ratio, "cannot be told: one start")
    if ratio.low > 1 + MARGIN:
        return Compared(Comparison.FASTER, ratio, f"by more than {MARGIN:.0%}")
    if ratio.high < 1 - MARGIN:
        return Compared(Comparison.SLOWER, ratio, f"by more than {MARGIN:.0%}")
    if ratio.low >= 1 - MARGIN and ratio.high <= 1 + MARGIN:
        return Compared(Comparison.NO_DIFFERENCE, ratio, f"the same within {MARGIN:.0%}")
    return Compared(Comparison.NO_DIFFERENCE, ratio, f"cannot be told: {ratio.n} starts differ too much")


def _resampled(runs: Sequence[LoadRun], generator: np.random.Generator) -> np.ndarray:
    """[RESAMPLES, runs] throughputs with each run's requests drawn anew.

    By Little's law a closed loop that keeps c requests in flight makes c * mean tokens / mean latency; c, the mean number
    in flight, is taken from the run.
    """
    columns = []
    for run in runs:
        good = [request for request in run.requests if not request.error]
        tokens = np.array([request.output_tokens for request in good], dtype=float)
        latency = np.array([request.latency_s for request in good])
        in_flight = latency.sum() / run.duration_s
        picks = generator.integers(len(good), size=(RESAMPLES, len(good)))
        columns.append(in_flight * tokens[picks].sum(axis=1) / latency[picks].sum(axis=1))
    return np.stack(columns, axis=1)
