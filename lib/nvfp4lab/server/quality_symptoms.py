"""Signs of a broken kernel in what a server wrote, counted per prompt and held against the reference's own answer."""

import dataclasses
import itertools
from collections.abc import Sequence

TOKEN_ZERO_RUN = 4  # argmax over NaN or all-equal logits is id 0: `!` in Qwen, <|endoftext|> in SmolLM2
REPEATED_RUN = 8


@dataclasses.dataclass(frozen=True)
class Symptoms:
    """Of one answer. repetition: share of 4-grams that occurred before in the same answer."""

    token_zero_run: int
    same_token_run: int
    replacement_characters: int
    repetition: float
    tokens: int


def symptoms(token_ids: Sequence[int], text: str) -> Symptoms:
    """Symptoms of one answer; a U+FFFD at the very end is only a character cut by the token limit."""
    return Symptoms(
        token_zero_run=_longest_run([token == 0 for token in token_ids]),
        same_token_run=_longest_same(token_ids),
        replacement_characters=text.rstrip("\ufffd").count("\ufffd"),
        repetition=_repetition(token_ids),
        tokens=len(token_ids),
    )


def _longest_run(flags: Sequence[bool]) -> int:
    longest = run = 0
    for flag in flags:
        run = run + 1 if flag else 0
        longest = max(longest, run)
    return longest


def _longest_same(token_ids: Sequence[int]) -> int:
    same = [previous == token for previous, token in itertools.pairwise(token_ids)]
    return _longest_run(same) + 1 if token_ids else 0


def _repetition(token_ids: Sequence[int], width: int = 4) -> float:
    grams = [tuple(token_ids[start : start + width]) for start in range(len(token_ids) - width + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
