"""Intervals and tests for paired, clustered measurements. Tokens of one prompt are not independent; prompts are.

Everything is resampled by cluster (a prompt, or a stretch of a long one), with a fixed seed.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

RESAMPLES = 4000
_SEED = 7


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval and the number of observations behind it."""

    value: float
    low: float
    high: float
    n: int


def wilson(hits: int, n: int, z: float = 1.959964) -> Interval:
    """Wilson's score interval of a share. n = 0 gives (nan, 0, 1)."""
    if n == 0:
        return Interval(math.nan, 0.0, 1.0, 0)
    share, denominator = hits / n, 1 + z * z / n
    centre = (share + z * z / (2 * n)) / denominator
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / denominator
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half), n)


def mean_interval(values: Sequence[float], clusters: Sequence[object]) -> Interval:
    """Mean with a percentile interval from resampling whole clusters."""
    values = np.asarray(values, float)
    if not len(values):
        return Interval(math.nan, math.nan, math.nan, 0)
    sums, counts = _by_cluster(values, clusters)
    means = _resampled_means(sums, counts)
    low, high = np.quantile(means, (0.025, 0.975))
    return Interval(float(values.mean()), float(low), float(high), len(values))


def excess_p_value(values: Sequence[float], floor: Sequence[float], margin: float, clusters: Sequence[object]) -> float:
    """One-sided p-value of H0: mean(values) <= margin * mean(floor), paired by position.

    A studentised cluster statistic (mean of the cluster sums of values - margin * floor over its standard error) against
    its sign-flip distribution: under H0 at its edge the cluster sums are symmetric about 0. Fewer than 6 clusters can
    never reach a small p-value, and give 1.0. Exact up to the symmetry; 2 ** n or `RESAMPLES` flips.
    """
    difference = np.asarray(values, float) - margin * np.asarray(floor, float)
    sums, _ = _by_cluster(difference, clusters)
    n = len(sums)
    if n < 6 or not np.any(sums):
        return 1.0
    random = np.random.default_rng(_SEED)
    flips = random.choice((-1.0, 1.0), size=(RESAMPLES * 4, n))
    observed = _studentised(sums[None])[0]
    return float((1 + np.sum(_studentised(flips * sums) >= observed)) / (1 + len(flips)))


def mcnemar_p_value(only_ours: int, only_theirs: int) -> float:
    """Exact one-sided p-value that a symptom is seen in ours alone as often as this by chance."""
    n = only_ours + only_theirs
    return sum(math.comb(n, k) for k in range(only_ours, n + 1)) / 2**n


def _studentised(rows: np.ndarray) -> np.ndarray:
    spread = rows.std(axis=1, ddof=1) / math.sqrt(rows.shape[1])
    return rows.mean(axis=1) / np.maximum(spread, 1e-300)


def _by_cluster(values: np.ndarray, clusters: Sequence[object]) -> tuple[np.ndarray, np.ndarray]:
    """(sum, count) of each cluster."""
    index = {cluster: number for number, cluster in enumerate(dict.fromkeys(clusters))}
    where = np.array([index[cluster] for cluster in clusters])
    return np.bincount(where, values, len(index)), np.bincount(where, minlength=len(index))


def _resampled_means(sums: np.ndarray, counts: np.ndarray) -> np.ndarray:
    chosen = np.random.default_rng(_SEED).integers(0, len(sums), (RESAMPLES, len(sums)))
    return sums[chosen].sum(1) / counts[chosen].sum(1)
