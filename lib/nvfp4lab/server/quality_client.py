"""Questions to a running SGLang server over HTTP: score given tokens, continue a prompt greedily, many at a time.

Prompts go as token ids, so no tokenizer and no template stands between the reference and the arm.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import requests

from nvfp4lab.errors import LabError
from nvfp4lab.server.quality_distance import Row
from nvfp4lab.server.quality_reference import SERVER_TOP

TIMEOUT_S = 600.0


class BadReply(LabError):
    """The server answered with something that is no answer: an HTTP error, or fields missing."""


@dataclasses.dataclass(frozen=True)
class Continuation:
    """A greedy answer. rows[j]: the server's distribution of token j, None where it gave null."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    rows: tuple[Row | None, ...]
    text: str
    finished: bool


def score(base_url: str, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> tuple[Row | None, ...]:
    """The server's distributions before each answer token, all computed in one prefill.

    SGLang lists input positions from `logprob_start_len` on, the first without a value; the last ones are the answer's.
    """
    reply = _generate(base_url, [*prompt_ids, *answer_ids], 1, logprob_start_len=max(0, len(prompt_ids) - 1))
    tokens = [entry[1] for entry in reply["meta_info"]["input_token_logprobs"][-len(answer_ids) :]]
    if tokens != list(answer_ids):
        raise BadReply(f"scored tokens {tokens[:4]}..., not the answer {list(answer_ids)[:4]}...")
    return tuple(map(_row, reply["meta_info"]["input_top_logprobs"][-len(answer_ids) :]))


def continue_greedily(base_url: str, prompt_ids: Sequence[int], tokens: int) -> Continuation:
    """At most `tokens` tokens after the prompt, one decode step each."""
    reply = _generate(base_url, list(prompt_ids), tokens)
    meta = reply["meta_info"]
    return Continuation(
        token_ids=tuple(entry[1] for entry in meta["output_token_logprobs"]),
        logprobs=tuple(entry[0] for entry in meta["output_token_logprobs"]),
        rows=tuple(map(_row, meta["output_top_logprobs"])),
        text=reply.get("text", ""),
        finished=(meta.get("finish_reason") or {}).get("type") == "stop",
    )


def in_parallel(ask: Callable[[Any], Any], questions: Sequence[Any], concurrency: int) -> list[Any]:
    """`ask` of every question, `concurrency` in flight at a time, answers in the order of the questions."""
    with concurrent.futures.ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, questions))


def _generate(base_url: str, input_ids: list[int], tokens: int, **extra: Any) -> dict[str, Any]:
    sampling = {"temperature": 0, "max_new_tokens": tokens}
    body = {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": SERVER_TOP} | extra
    response = requests.post(f"{base_url}/generate", json=body, timeout=TIMEOUT_S)
    if response.status_code != 200:
        raise BadReply(f"HTTP {response.status_code}: {response.text[:300]}")
    reply = response.json()
    if "meta_info" not in reply or "output_token_logprobs" not in reply["meta_info"]:
        raise BadReply(f"no log-probabilities in the reply: {str(reply)[:300]}")
    return reply


def _row(entries: Sequence[Sequence[Any]] | None) -> dict[int, float | None] | None:
    return {entry[1]: entry[0] for entry in entries} if entries else None
