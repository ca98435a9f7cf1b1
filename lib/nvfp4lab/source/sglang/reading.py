"""What every reader of SGLang gets: the package's index and vocabulary, and how a fact of it is written."""

import ast
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nvfp4lab.source.evaluate import Evaluator
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flow import Event, Flow
from nvfp4lab.source.index import Index
from nvfp4lab.source.module import Definition
from nvfp4lab.source.sglang.vocabulary import SglangVocabulary
from nvfp4lab.source.values import Scenario

Spot = tuple[str, int]  # member, line


@dataclasses.dataclass(eq=False)
class Reading:
    """One SGLang version being read."""

    index: Index
    remembered: dict[tuple, Any] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def vocabulary(self) -> SglangVocabulary:
        return SglangVocabulary(self.index)

    @property
    def version(self) -> str:
        return self.index.package.version

    def evaluator(self, scenario: Scenario) -> Evaluator:
        return Evaluator(self.index, self.vocabulary, scenario)

    def flow(self, definition: Definition, scenario: Scenario, env: dict[str, Any] | None = None) -> Flow:
        return Flow(self.evaluator(scenario), definition, env)

    def fact(
        self,
        subject: str,
        predicate: str,
        value: Any,
        spot: Spot,
        *,
        when: Mapping[str, Any] | None = None,
        also: Iterable[Spot] = (),
        scope: str = "",
        note: str = "",
        derived: bool = False,
    ) -> Fact:
        """A fact of this version at `spot`; evidence lines are filled in, repeated places left out."""
        places = [self.index.place(*other) for other in dict.fromkeys(also) if other != spot]
        evidence = self.index.place(*spot).evidence
        return Fact(
            "sglang",
            self.version,
            subject,
            predicate,
            value,
            *spot,
            dict(when or {}),
            evidence,
            tuple(places),
            scope,
            note,
            derived,
        )

    def not_found(self, subject: str, predicate: str, looked_for: str, where: str) -> Fact:
        """A fact of its own: what was looked for and where. Never a guess in its place."""
        note = f"looked for {looked_for} in {where}; this version may keep it elsewhere"
        return Fact("sglang", self.version, subject, "not_found", predicate, where, 0, note=note)


def per_reading(function: Callable[..., Any]) -> Callable[..., Any]:
    """Remember a function's answers in the reading that it is asked about, for as long as that reading lives."""

    @functools.wraps(function)
    def ask(reading: Reading, *arguments: Any) -> Any:
        key = (function.__qualname__, function.__module__, *arguments)
        if key not in reading.remembered:
            reading.remembered[key] = function(reading, *arguments)
        return reading.remembered[key]

    return ask


def spot(event: Event) -> Spot:
    return event.definition.file, event.line


def chain(event: Event) -> list[Spot]:
    """The event's line, the lines of its own expression or test, and of the conditions on the way."""
    member = event.definition.file
    lines = [event.line]
    if isinstance(event.node, ast.Assert):
        lines.append(event.node.test.lineno)
    lines += [line for guard in event.guards for line in (guard.line, getattr(guard.test, "lineno", guard.line))]
    return [(member, line) for line in dict.fromkeys([*lines, *event.decided])]


def condition(event: Event) -> str:
    """What must hold for an event, in words: the conditions that hold, not the checks that were passed on the way."""
    holding = [guard.text for guard in event.guards if guard.holds] or [guard.text for guard in event.guards[-1:]]
    return " and ".join(holding) or "always"
