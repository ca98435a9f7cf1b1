"""Keeps asking canary prompts while load runs: a server may answer right alone and babble in a full batch."""

import dataclasses
import threading
import time
from typing import Protocol

import requests

from nvfp4lab.errors import LabError
from nvfp4lab.params import Params
from nvfp4lab.records import WrongKind
from nvfp4lab.server import arms_reference, arms_scores
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.quality_canary import Canary, Fault

DUTY = 0.25
PROMPTS = 2  # of the reference's canaries: each check must fit into a short row


class Checks(Protocol):
    """Something that can ask a server and say what was wrong, None for nothing; never raises for the server."""

    def check(self, base_url: str) -> Fault | None: ...


@dataclasses.dataclass(frozen=True)
class PatternCanary:
    """Patterns that any model continues; for models without a reference."""

    tokens: int

    def check(self, base_url: str) -> Fault | None:
        for prompt, must_match in arms_scores.CANARIES:
            try:
                answer = arms_scores.canary(base_url, prompt, must_match, self.tokens)
            except requests.Timeout as error:
                return Fault(None, f"{prompt!r}: no answer, {error}")
            except (requests.RequestException, ValueError, KeyError) as error:
                return Fault(WrongKind.GARBAGE, f"{prompt!r}: no answer, {type(error).__name__}")
            if answer.kind is not None:
                return Fault(answer.kind, f"{prompt!r}: {answer.why}, got {answer.text!r}")
        return None


def canary_for(arm: Arm, p: Params) -> Checks:
    """The reference's canaries where the arm has a reference that is sure of something, else patterns."""
    stick = arms_reference.yardstick(arm, p)
    try:
        return Canary.of(stick.reference, stick.floor, PROMPTS, p.canary_tokens) if stick else PatternCanary(p.canary_tokens)
    except LabError:
        return PatternCanary(p.canary_tokens)


class CanaryWatch:
    """Repeats a check in a thread while its block runs, until the first fault; one check at least is always finished.

    It is one more request in flight, in every arm alike, for at most DUTY of the time: it must not become the load.
    """

    def __init__(self, checks: Checks, url: str):
        self.asked = 0
        self.fault: Fault | None = None
        self._checks, self._url = checks, url
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)

    def __enter__(self) -> "CanaryWatch":
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while self.fault is None and not (self._over.is_set() and self.asked):
            began_s = time.monotonic()
            self.fault = self._checks.check(self._url)
            self.asked += 1
            self._over.wait((time.monotonic() - began_s) * (1 - DUTY) / DUTY)
