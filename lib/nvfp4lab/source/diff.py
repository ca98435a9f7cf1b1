"""What changed between two versions: facts that appeared, went, changed their value or moved, and routes that end elsewhere.

Facts are joined by subject, predicate and conditions. Prose facts (`requires`, `raises_on`) have many values under one key
and count as a set. A fact whose value stayed while its file changed has moved: nothing changes for a user, but a
patch or a grep of the old place misses it.
"""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.routes_query import Route

Kind = Literal["added", "removed", "changed", "moved"]

# Topic -> predicates, in the order in which a reader wants them; a predicate in none of them is "other".
TOPICS: dict[str, tuple[str, ...]] = {
    "auto": ("auto_resolves", "auto_candidates", "default", "default_backend", "runner_object"),
    "choices": ("cli_choices", "enum_values", "backends", "exists", "cli_flag", "flashinfer_backend_name"),
    "wiring": ("wiring", "final_call", "registered_fused_func", "has_runner_core", "branches", "stored_in", "initialised_from"),
    "gates": ("supported_cc", "supported_majors", "built_for_majors", "enforced", "min_capability", "allowed_quantization"),
    "checks": ("raises_on", "requires", "requires_k", "requires_n", "requires_dtype", "requires_ep", "gate_cpp", "gate_py"),
    "weights": ("weight_prep", "weight_prep_padding", "weight_prep_shard_swap", "activation_quant", "dtype_shape"),
    "pins": ("requires_flashinfer", "requires_sgl_kernel"),
}
_SAME_PLACE_PREDICATES = ("requires", "raises_on", "gate_", "depends")


@dataclasses.dataclass(frozen=True)
class Change:
    """One difference. before, after: values, None where there is none. places: "file:line" of either side."""

    kind: Kind
    topic: str
    subject: str
    predicate: str
    when: str
    before: Any
    after: Any
    place_before: str
    place_after: str

    @property
    def text(self) -> str:
        """One line for a person."""
        name = f"{self.subject} {self.predicate}" + (f" when {self.when}" if self.when else "")
        if self.kind == "moved":
            return f"{name}: {_say(self.after)} moved from {self.place_before} to {self.place_after}"
        if self.kind == "changed":
            return f"{name}: {_say(self.before)} -> {_say(self.after)}  ({self.place_before} -> {self.place_after})"
        value, place = (self.after, self.place_after) if self.kind == "added" else (self.before, self.place_before)
        return f"{name}: {_say(value)}  ({place})"


@dataclasses.dataclass(frozen=True)
class RouteChange:
    """One flag value whose route ends otherwise than before; None where the value did not exist."""

    op: str
    backend: str
    when: str
    before: Route | None
    after: Route | None


def of_facts(before: Iterable[Fact], after: Iterable[Fact]) -> list[Change]:
    """All changes between the facts of two versions of one package, by topic, then subject."""
    old, new = _by_key(before), _by_key(after)
    found = [change for key in old.keys() | new.keys() for change in _changes(key, old.get(key, []), new.get(key, []))]
    order = [*TOPICS, "other"]
    return sorted(found, key=lambda change: (order.index(change.topic), change.subject, change.predicate, change.when, change.text))


def of_routes(before: Iterable[Route], after: Iterable[Route]) -> list[RouteChange]:
    """Routes whose expected outcome or final call differs, those of new values and of values that went."""
    old, new = ({(route.op, route.backend, str(dict(route.when))): route for route in side} for side in (before, after))
    found = []
    for key in [*old, *(key for key in new if key not in old)]:
        left, right = old.get(key), new.get(key)
        if left is None or right is None or (left.expected, left.final_call) != (right.expected, right.final_call):
            found.append(RouteChange(*key[:2], (left or right).condition, left, right))
    return found


def _by_key(facts: Iterable[Fact]) -> Mapping[tuple[str, str, str], list[Fact]]:
    found = defaultdict(list)
    for fact in facts:
        found[fact.subject, fact.predicate, _words(fact.when)].append(fact)
    return found


def _changes(key: tuple[str, str, str], old: list[Fact], new: list[Fact]) -> Iterable[Change]:
    kept_old, kept_new = _by_value(old), _by_value(new)
    gone = [fact for value, fact in kept_old.items() if value not in kept_new]
    come = [fact for value, fact in kept_new.items() if value not in kept_old]
    topic = next((name for name, predicates in TOPICS.items() if key[1] in predicates), "other")
    if len(gone) == len(come) == 1:
        yield _change("changed", topic, key, gone[0], come[0])
    else:
        yield from (_change("removed", topic, key, fact, None) for fact in gone)
        yield from (_change("added", topic, key, None, fact) for fact in come)
    if not key[1].startswith(_SAME_PLACE_PREDICATES):
        for value in kept_old.keys() & kept_new.keys():
            if kept_old[value].file != kept_new[value].file:
                yield _change("moved", topic, key, kept_old[value], kept_new[value])


def _by_value(facts: list[Fact]) -> dict[str, Fact]:
    return {_words(sorted(fact.value, key=str) if isinstance(fact.value, list) else fact.value): fact for fact in facts}


def _change(kind: Kind, topic: str, key: tuple[str, str, str], old: Fact | None, new: Fact | None) -> Change:
    subject, predicate, when = key
    return Change(
        kind,
        topic,
        subject,
        predicate,
        "" if when == "{}" else when,
        old.value if old else None,
        new.value if new else None,
        f"{old.file}:{old.line}" if old else "",
        f"{new.file}:{new.line}" if new else "",
    )


def _words(value: Any) -> str:
    return json.dumps(value if not isinstance(value, Mapping) else dict(value), sort_keys=True, ensure_ascii=False, default=str)


def _say(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
