"""How far one next-token distribution is from another, when a server tells only its likeliest tokens.

Estimator: the tokens that both sides list are kept, everything else is one bucket on each side; KL is taken over those.
Merging outcomes never raises a divergence (data processing inequality), so this is a lower bound of the KL over the whole
vocabulary. Truncation: what a backend does wrong only to tokens outside the top list is not seen; both
the top tokens and the size of the rest are. Both sides of every comparison are cut alike, so their bias is the same.
"""

import math
from collections.abc import Mapping

Row = Mapping[int, float]  # token id -> log-probability in nats, the likeliest tokens of one position
_SMALLEST_REST = 1e-9


def kl_nats(reference: Row, other: Row) -> float:
    """Lower bound of KL(reference || other) in nats; finite, as the bucket of the rest never counts as less than 1e-9."""
    shared = reference.keys() & other.keys()
    total = sum(math.exp(reference[token]) * (reference[token] - other[token]) for token in shared)
    rest = max(0.0, 1.0 - math.fsum(math.exp(reference[token]) for token in shared))
    rest_other = max(_SMALLEST_REST, 1.0 - math.fsum(math.exp(other[token]) for token in shared))
    if rest > _SMALLEST_REST:
        total += rest * math.log(rest / rest_other)
    return max(0.0, total)


def top1(row: Row) -> int:
    """The likeliest token; the smaller id of equals."""
    return min(row, key=lambda token: (-row[token], token))


def is_sound(row: Row | None) -> bool:
    """Whether a row is there and all its log-probabilities are finite and at most 0 (within rounding)."""
    return bool(row) and all(value is not None and math.isfinite(value) and value < 1e-3 for value in row.values())


def cut(row: Row, top: int) -> dict[int, float]:
    """The `top` likeliest tokens of a row."""
    return dict(sorted(row.items(), key=lambda item: (-item[1], item[0]))[:top])
