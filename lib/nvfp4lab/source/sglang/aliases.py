"""Values that the command line takes and no enum has: what a rule turns them into, or that nothing does."""

import ast
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flow import Event
from nvfp4lab.source.sglang import rules, server_args
from nvfp4lab.source.sglang.reading import Reading, Spot, chain, spot
from nvfp4lab.source.sglang.vocabulary import ENUMS
from nvfp4lab.source.values import Scenario

_FIELDS = tuple(field for _, field in ENUMS.values())


def read(reading: Reading) -> Iterator[Fact]:
    """`moe_runner:megamoe alias_of ["moe_a2a_backend=megamoe", ...]` and the like."""
    for fact in server_args.read(reading):
        enum = reading.vocabulary.enums.get(fact.subject)
        if fact.predicate != "cli_choices" or enum is None:
            continue
        for value in fact.value:
            if value not in enum.members.values():
                yield from _alias(reading, fact, value)


def _alias(reading: Reading, choices: Fact, value: str) -> Iterator[Fact]:
    field = ENUMS[choices.subject][1]
    subject = f"{choices.subject}:{value}"
    for definition in rules.functions(reading, field):
        if not rules.literals(definition, [value]):
            continue
        flow = reading.flow(definition, Scenario.of(None, **{field: value}))
        sure = [event for event in flow.events if not any(guard.holds for guard in event.guards)]
        written = {name: (word, event) for event in sure for name, word in _written(event).items()}
        if field in written and written[field][0] != value:
            words = [f"{name}={word}" for name, (word, _) in written.items()]
            at = written[field][1]
            also = [place for _, event in written.values() for place in [*chain(event), *_keyword_spots(event)]]
            yield reading.fact(subject, "alias_of", words, spot(at), also=also, scope=definition.scope)
            return
    yield reading.not_found(
        subject, "alias_of", f"a rule that rewrites {field} == {value!r}", "all rules on the server's arguments"
    )


def _written(event: Event) -> dict[str, object]:
    """Backend fields that an event sets to literals: by assignment, or as keywords of a declaring call."""
    if event.kind == "set" and isinstance(event.value, str):
        name = event.dotted.rsplit(".", 1)[-1]
        return {name: event.value} if name in _FIELDS else {}
    keywords = event.node.keywords if event.kind == "call" else []
    return {word.arg: word.value.value for word in keywords if word.arg in _FIELDS and isinstance(word.value, ast.Constant)}


def _keyword_spots(event: Event) -> list[Spot]:
    keywords = event.node.keywords if event.kind == "call" else []
    return [(event.definition.file, word.value.lineno) for word in keywords]
