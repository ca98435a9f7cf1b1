"""Asks a running SGLang server through `/generate`: canary prompts, and the probabilities it gives to fixed texts.

Fixed texts make arms comparable token by token: every arm scores the same tokens, so one early difference in a greedy
continuation does not make the rest incomparable.
"""

import dataclasses
import math
import re
from collections.abc import Sequence

import requests

from nvfp4lab.records import Number, WrongKind
from nvfp4lab.server.arms_judge import Finding

# Patterns that a model of any size continues in one way, with what must occur in the answer. No facts: NVFP4 itself makes
# SmolLM2-135M forget the capital of France ("123,212"), with a perfect kernel.
CANARIES: tuple[tuple[str, str], ...] = (
    ("Monday, Tuesday, Wednesday, Thursday,", r"Friday"),
    ("1, 2, 3, 4, 5, 6, 7,", r"8"),
    ("A B C D E F", r"G"),
)
TEXTS: tuple[str, ...] = (
    "Water boils at one hundred degrees Celsius at sea level. On a high mountain the air is thinner, so it boils earlier.",
    "def add(a, b):\n    return a + b\n\nprint(add(2, 3))",
)
TOP = 20  # of each position's distribution; the rest is one bucket
TIMEOUT_S = 300.0


@dataclasses.dataclass(frozen=True)
class Answer:
    """A canary's answer; kind None: it is what it should be."""

    prompt: str
    text: str
    kind: WrongKind | None
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Interview:
    """All that one server said: canary answers, and per text the scores position by position."""

    answers: tuple[Answer, ...]
    scores: tuple[list[dict[int, float]], ...]

    def finding(self) -> Finding:
        """The verdict of the canaries alone; the scores are compared later, with the reference's."""
        bad = [answer for answer in self.answers if answer.kind is not None]
        kind = next((answer.kind for answer in bad), None)
        reason = "; ".join(f"{answer.prompt!r} -> {answer.text!r}: {answer.why}" for answer in bad)
        rows = [{"prompt": answer.prompt, "answer": answer.text, "why_wrong": answer.why} for answer in self.answers]
        return Finding(
            kind, reason, (Number("canaries_passed", len(self.answers) - len(bad), "1", n=len(self.answers)),), {"canaries": rows}
        )


def interview(url: str, tokens: int) -> Interview:
    """Ask every canary (`tokens` each), then have every text scored. Raises requests' errors when the server is gone."""
    answers = tuple(canary(url, prompt, must_match, tokens) for prompt, must_match in CANARIES)
    return Interview(answers, tuple(score(url, text) for text in TEXTS))


def canary(url: str, prompt: str, must_match: str, tokens: int) -> Answer:
    """Ask one prompt greedily. Raises requests' errors when the server is gone."""
    reply = _generate(url, text=prompt, sampling_params={"temperature": 0, "max_new_tokens": tokens}, return_logprob=True)
    text, logprobs = reply["text"], [row[0] for row in reply["meta_info"]["output_token_logprobs"]]
    if any(value is None or not math.isfinite(value) for value in logprobs):
        return Answer(prompt, text, WrongKind.NAN, "a null or non-finite log-probability")
    if not re.search(must_match, text):
        return Answer(prompt, text, WrongKind.GARBAGE, f"no {must_match!r} in the answer")
    return Answer(prompt, text, None)


def score(url: str, text: str) -> list[dict[int, float]]:
    """For each token of `text` after the first: {token id: log-probability} of the TOP likeliest tokens there."""
    reply = _generate(
        url,
        text=text,
        sampling_params={"temperature": 0, "max_new_tokens": 1},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=TOP,
    )
    rows = reply["meta_info"]["input_top_logprobs"]
    return [{token: logprob for logprob, token, _ in row} for row in rows if row]


def kl_nats(reference: dict[int, float], other: dict[int, float]) -> float:
    """KL(reference || other) in nats over the tokens that both list, what is left over as one more bucket.

    Merging outcomes can only lower a divergence, so this is a lower bound of the KL over the whole vocabulary.
    """
    shared = sorted(reference.keys() & other.keys())
    pairs = [(math.exp(reference[token]), math.exp(other[token])) for token in shared]
    rest = (max(1.0 - sum(p for p, _ in pairs), 0.0), max(1.0 - sum(q for _, q in pairs), 1e-12))
    return max(0.0, sum(p * math.log(p / q) for p, q in [*pairs, rest] if p > 0))


def kl_by_token(reference: Sequence[dict[int, float]], other: Sequence[dict[int, float]]) -> list[float]:
    """`kl_nats` position by position; both must have scored the same text."""
    return [kl_nats(p, q) for p, q in zip(reference, other, strict=True)]


def _generate(url: str, **body) -> dict:
    response = requests.post(f"{url}/generate", json=body, timeout=TIMEOUT_S)
    response.raise_for_status()
    return response.json()
