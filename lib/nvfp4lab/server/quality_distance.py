"""How far one next-token distribution is from another, when a server tells only its likeliest tokens.

Estimator: the smallest KL(reference || other) that the listed log-probabilities allow. Tokens that both list enter exactly. Of
the reference's tokens that the other does not list it is known that each has at most the smallest listed probability,
and that what the other lists besides is somewhere else; under these bounds the divergence is least when the unknown
mass is proportional to the reference's (Gibbs), clipped to the bounds. So this is a lower bound of the KL over the whole
vocabulary, and it does not vanish when the two lists are disjoint, as merging all unlisted tokens into one bucket would.
Truncation: what a backend does wrong only among tokens that neither lists is not seen. Both sides of every comparison
(arm and floor) are cut alike.
"""

import math
from collections.abc import Mapping

import numpy as np

Row = Mapping[int, float]  # token id -> log-probability in nats, the likeliest tokens of one position
_LEAST = 1e-12
_HALVINGS = 24  # of a range of e**55: c to 3e-6


def kl_nats(reference: Row, other: Row) -> float:
    """The least KL(reference || other) in nats that the two rows allow; finite and not negative."""
    shared = reference.keys() & other.keys()
    total = math.fsum(math.exp(reference[token]) * (reference[token] - other[token]) for token in shared)
    p_unlisted = np.exp([reference[token] for token in reference.keys() - shared])
    p_rest = max(0.0, 1.0 - math.fsum(map(math.exp, reference.values())))
    q_open = max(0.0, 1.0 - math.fsum(math.exp(other[token]) for token in shared))
    q_elsewhere = min(q_open, math.fsum(math.exp(other[token]) for token in other.keys() - shared))
    q_unlisted, q_rest = _likeliest(p_unlisted, p_rest, q_open, q_elsewhere, math.exp(min(other.values())))
    total += float(np.sum(p_unlisted * np.log(p_unlisted / np.maximum(q_unlisted, _LEAST))))
    if p_rest > _LEAST:
        total += p_rest * math.log(p_rest / max(q_rest, _LEAST))
    return max(0.0, total)


def _likeliest(p: np.ndarray, p_rest: float, mass: float, rest_at_least: float, at_most: float) -> tuple[np.ndarray, float]:
    """Split `mass` over the entries of p (each at most `at_most`) and the rest (at least `rest_at_least`), nearest to p in KL.

    The solution is min(c * p, at_most) and max(c * p_rest, rest_at_least) for the c that uses up the mass.
    """
    c = mass / max(float(p.sum()) + p_rest, _LEAST)
    if c * p_rest >= rest_at_least and (not p.size or c * p.max() <= at_most):
        return c * p, c * p_rest  # no bound is met, the common case of two similar rows
    low, high = 0.0, 1.0 / _LEAST
    for _ in range(_HALVINGS):
        c = math.sqrt(max(low, _LEAST) * high)
        if float(np.minimum(c * p, at_most).sum()) + max(c * p_rest, rest_at_least) > mass:
            high = c
        else:
            low = c
    return np.minimum(high * p, at_most), max(high * p_rest, rest_at_least)  # the side that keeps it a lower bound


def top1(row: Row) -> int:
    """The likeliest token; the smaller id of equals."""
    return min(row, key=lambda token: (-row[token], token))


def is_sound(row: Row | None) -> bool:
    """Whether a row is there and all its log-probabilities are finite and at most 0 (within rounding)."""
    return bool(row) and all(value is not None and math.isfinite(value) and value < 1e-3 for value in row.values())


def cut(row: Row, top: int) -> dict[int, float]:
    """The `top` likeliest tokens of a row."""
    return dict(sorted(row.items(), key=lambda item: (-item[1], item[0]))[:top])
