"""A few short prompts that a load test asks in between: is the server, under this load, still right?

Which tokens to insist on is decided by the reference and the floor, not by hand: the leading tokens at which both put
the same token first with CANARY_MARGIN_NATS to spare. No correct kernel moves a log-probability that far.
"""

import dataclasses

import requests

from nvfp4lab.errors import LabError
from nvfp4lab.records import WrongKind
from nvfp4lab.server import quality_client as client
from nvfp4lab.server.quality_distance import Row, is_sound, top1
from nvfp4lab.server.quality_reference import Floor, Reference

CANARY_MARGIN_NATS = 1.0
MAX_PROMPT_TOKENS = 128
MIN_EXPECTED_TOKENS = 2


@dataclasses.dataclass(frozen=True)
class Fault:
    """What was wrong with an answer. kind None: there was none in time."""

    kind: WrongKind | None
    what: str


@dataclasses.dataclass(frozen=True)
class CanaryPrompt:
    """A prompt and the tokens that its greedy answer must begin with."""

    name: str
    prompt_ids: tuple[int, ...]
    expected_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Canary:
    """The canaries of one model. `check` is cheap: some ten tokens a prompt."""

    prompts: tuple[CanaryPrompt, ...]

    @classmethod
    def of(cls, ref: Reference, floor: Floor, count: int = 4, max_tokens: int = 12) -> "Canary":
        """The `count` short prompts with the longest certain beginnings. Raises LabError when the model is sure of none."""
        found = []
        for item, floor_rows in zip(ref.items, floor.rows, strict=True):
            certain = _certain_tokens(item.rows[:max_tokens], floor_rows[:max_tokens])
            if certain >= MIN_EXPECTED_TOKENS and len(item.prompt.token_ids) <= MAX_PROMPT_TOKENS:
                found.append(CanaryPrompt(item.prompt.name, item.prompt.token_ids, item.answer_ids[:certain]))
        if not found:
            raise LabError(
                f"{ref.model}: no prompt has {MIN_EXPECTED_TOKENS} certain tokens in both reference and floor; use more prompts"
            )
        found.sort(key=lambda prompt: -len(prompt.expected_ids))
        return cls(tuple(found[:count]))

    def check(self, base_url: str) -> Fault | None:
        """None when every canary sings, else what was wrong with the first that did not; never raises for the server."""
        for prompt in self.prompts:
            if (fault := _fault(base_url, prompt)) is not None:
                return dataclasses.replace(fault, what=f"{prompt.name}: {fault.what}")
        return None


def _fault(base_url: str, prompt: CanaryPrompt) -> Fault | None:
    try:
        answer = client.continue_greedily(base_url, prompt.prompt_ids, len(prompt.expected_ids))
    except requests.Timeout as error:
        return Fault(None, f"no answer, {error}")
    except (LabError, requests.RequestException, ValueError) as error:
        return Fault(WrongKind.GARBAGE, str(error))
    if not all(map(is_sound, answer.rows)):
        return Fault(WrongKind.NAN, "null or non-finite log-probabilities")
    if answer.token_ids != prompt.expected_ids:
        return Fault(WrongKind.GARBAGE, f"answered tokens {list(answer.token_ids)}, must be {list(prompt.expected_ids)}")
    return None


def _certain_tokens(rows: tuple[Row, ...], floor_rows: tuple[Row, ...]) -> int:
    for count, (row, floor_row) in enumerate(zip(rows, floor_rows, strict=True)):
        if top1(row) != top1(floor_row) or min(_lead_nats(row), _lead_nats(floor_row)) < CANARY_MARGIN_NATS:
            return count
    return len(rows)


def _lead_nats(row: Row) -> float:
    first, second = sorted(row.values(), reverse=True)[:2]
    return first - second
