"""The questions of the server matrix, and what was answered, kept for the pictures.

With a yardstick the full comparison with the reference model is asked (`quality`); where no arm has one, canaries and
fixed texts (`arms_scores`), whose scores are compared with the first arm's.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nvfp4lab.server import arms_scores, quality
from nvfp4lab.server.arms_judge import Finding
from nvfp4lab.server.arms_reference import Yardstick
from nvfp4lab.server.launch import Server
from nvfp4lab.server.quality_distance import is_sound, kl_nats


@dataclasses.dataclass
class AgainstReference:
    """Asks every arm the prompts of its yardstick; one that has none gets canaries only. told: what each said, JSON-able.

    concurrency: at which everything is asked once more. tokens: of each canary.
    """

    yardsticks: Mapping[str, Yardstick]
    concurrency: int
    tokens: int
    reference: str = "reference"
    told: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def __call__(self, server: Server) -> Finding:
        stick = self.yardsticks.get(server.name)
        if stick is None:
            return arms_scores.interview(server.url, self.tokens).finding()
        given = quality.ask(server.url, stick.reference, self.concurrency)
        pairs = list(zip(stick.reference.items, given, strict=True))
        scored = [rows for item, answer in pairs for rows in zip(item.rows, answer.scored, strict=True)]
        self.told[server.name] = {
            "kl_nats": [kl_nats(expected, row) for expected, row in scored if is_sound(row)],
            "answers": {item.prompt.name: answer.alone.text for item, answer in pairs},
        }
        return quality.judge_answers(stick.reference, stick.floor, given, self.concurrency)

    def answers(self) -> dict[str, dict[str, str]]:
        """Reference and arms -> prompt -> answer."""
        sticks = list(self.yardsticks.values())
        reference = {item.prompt.name: item.answer_text for stick in sticks[:1] for item in stick.reference.items}
        return {self.reference: reference} | {name: told["answers"] for name, told in self.told.items()}

    def kl_nats(self) -> dict[str, list[float]]:
        """KL(reference || arm) at each scored token, by arm."""
        return {name: told["kl_nats"] for name, told in self.told.items()}

    def perfect_kl_nats(self) -> dict[str, list[float]]:
        """The same for perfect kernels on the arm's weights."""
        return {name: [v for item in stick.floor.kl_nats for v in item] for name, stick in self.yardsticks.items()}


@dataclasses.dataclass
class AgainstFirst:
    """Asks every arm the same canaries and texts; `reference` is the name of the first."""

    reference: str
    tokens: int
    told: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    def __call__(self, server: Server) -> Finding:
        interview = arms_scores.interview(server.url, self.tokens)
        self.told[server.name] = {
            "scores": [[list(row.items()) for row in rows] for rows in interview.scores],
            "answers": {answer.prompt: answer.text for answer in interview.answers},
        }
        return interview.finding()

    def answers(self) -> dict[str, dict[str, str]]:
        """Arm -> prompt -> answer."""
        return {name: told["answers"] for name, told in self.told.items()}

    def kl_nats(self) -> dict[str, list[float]]:
        """KL(first arm || arm) at each scored token; {} when the first arm did not answer."""
        rows = {name: [dict(map(tuple, row)) for text in told["scores"] for row in text] for name, told in self.told.items()}
        first = rows.pop(self.reference, None)
        return {} if first is None else {name: arms_scores.kl_by_token(first, other) for name, other in rows.items()}

    def perfect_kl_nats(self) -> dict[str, list[float]]:
        """Not known without a reference."""
        return {}
