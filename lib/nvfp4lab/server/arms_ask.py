"""The questions of the server matrix, and what was answered, kept for the pictures.

With a yardstick for every arm the full comparison with the reference model is asked (`quality`); else canaries and fixed
texts (`arms_scores`), whose scores are compared with the first arm's.
"""

import dataclasses
from collections.abc import Mapping

from nvfp4lab.server import arms_scores, quality
from nvfp4lab.server.arms_judge import Finding
from nvfp4lab.server.arms_reference import Yardstick
from nvfp4lab.server.arms_scores import Interview
from nvfp4lab.server.launch import Server
from nvfp4lab.server.quality_distance import is_sound, kl_nats


@dataclasses.dataclass
class AgainstReference:
    """Asks every arm the prompts of its yardstick. concurrency: at which everything is asked once more."""

    yardsticks: Mapping[str, Yardstick]
    concurrency: int
    reference: str = "the reference"
    kl: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    answers: dict[str, dict[str, str]] = dataclasses.field(default_factory=dict)

    def __call__(self, server: Server) -> Finding:
        stick = self.yardsticks[server.name]
        given = quality.ask(server.url, stick.reference, self.concurrency)
        pairs = [(item, answer) for item, answer in zip(stick.reference.items, given, strict=True)]
        self.kl[server.name] = [
            kl_nats(expected, row)
            for item, answer in pairs
            for expected, row in zip(item.rows, answer.scored, strict=True)
            if is_sound(row)
        ]
        self.answers.setdefault("reference", {item.prompt.name: item.answer_text for item, _ in pairs})
        self.answers[server.name] = {item.prompt.name: answer.alone.text for item, answer in pairs}
        return quality.judge_answers(stick.reference, stick.floor, given, self.concurrency)

    def kl_nats(self) -> dict[str, list[float]]:
        """KL(reference || arm) at each scored token, by arm; and of perfect kernels on the same weights, where that differs."""
        floors = {stick.floor.model: stick.floor for stick in self.yardsticks.values()}
        perfect = {
            f"perfect kernels on {name.rpartition('/')[2]}": [v for row in f.kl_nats for v in row] for name, f in floors.items()
        }
        return self.kl | perfect


@dataclasses.dataclass
class AgainstFirst:
    """Asks every arm the same canaries and texts."""

    reference: str
    tokens: int
    interviews: dict[str, Interview] = dataclasses.field(default_factory=dict)

    def __call__(self, server: Server) -> Finding:
        self.interviews[server.name] = arms_scores.interview(server.url, self.tokens)
        return self.interviews[server.name].finding()

    @property
    def answers(self) -> dict[str, dict[str, str]]:
        """Arm -> prompt -> answer."""
        return {name: {a.prompt: a.text for a in interview.answers} for name, interview in self.interviews.items()}

    def kl_nats(self) -> dict[str, list[float]]:
        """KL(first arm || arm) at each scored token; {} when the first arm did not answer."""
        first = self.interviews.get(self.reference)
        if first is None:
            return {}
        others = {name: interview for name, interview in self.interviews.items() if interview is not first}
        return {
            name: [kl for p, q in zip(first.scores, other.scores, strict=True) for kl in arms_scores.kl_by_token(p, q)]
            for name, other in others.items()
        }
