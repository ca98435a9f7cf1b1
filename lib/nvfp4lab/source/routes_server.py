"""What the server's argument handling does to one backend value before a layer exists: accept, rewrite `auto`, refuse."""

import ast
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from nvfp4lab.errors import LabError
from nvfp4lab.source.facts import Fact, Facts, holds
from nvfp4lab.source.flow import Event
from nvfp4lab.source.module import Definition
from nvfp4lab.source.routes_query import FLAG_FIELDS, FLAGS, Gate, Hop, Operation, Query
from nvfp4lab.source.routes_walk import Refusal, Walk, Walker, said
from nvfp4lab.source.sglang import rules
from nvfp4lab.source.sglang.reading import Reading
from nvfp4lab.source.values import Scenario

SUBJECTS: dict[Operation, str] = {"moe": "moe_runner", "fp4_gemm": "fp4_gemm"}


@dataclasses.dataclass(frozen=True)
class Resolution:
    """What one flag value is when layers are built. `when`: further conditions; hops: the lines that decide."""

    backend: str
    when: Mapping[str, Any]
    hops: tuple[Hop, ...]


def values(facts: Facts, op: Operation) -> dict[str, Fact | None]:
    """Every value of the flag -> the fact that the command line accepts it; None for one that only the enum has."""
    accepted = facts.query(SUBJECTS[op], "cli_choices")
    enum = facts.query(SUBJECTS[op], "enum_values")
    found = {str(value): fact for fact in accepted for value in fact.value}
    return found | {str(value): None for fact in enum for value in fact.value if value not in found}


def lost_enum(facts: Facts, op: Operation) -> Fact | None:
    """The `not_found` fact of the flag's enum: without its members no branch on the backend can be decided, so none is guessed."""
    return next((fact for fact in facts.query(SUBJECTS[op], "not_found") if fact.value == "enum_values"), None)


def check_a2a(facts: Facts, query: Query) -> None:
    """Raises LabError when this SGLang has no such --moe-a2a-backend. Where its values were not found, any is taken."""
    said = [fact for predicate in ("cli_choices", "enum_values") for fact in facts.query("moe_a2a", predicate)]
    known = list(dict.fromkeys(str(value) for fact in said for value in fact.value))
    if known and query.a2a not in known:
        raise LabError(f"no --moe-a2a-backend {query.a2a!r}; this version has: {', '.join(known)}")


def question(query: Query) -> dict[str, Any]:
    """The query in the words of the facts' `when`."""
    asked: dict[str, Any] = {"cc": query.cc, "a2a": query.a2a, "quantization": query.quant}
    asked["quantization_flag"] = query.quant if query.flag_given else None
    if query.model_arch is not None:
        asked |= {"model_arch": query.model_arch, "model_family": rules.family(query.model_arch)}
    return asked


def resolutions(facts: Facts, op: Operation, backend: str, query: Query) -> list[Resolution]:
    """What `backend` becomes. `auto` may become several values, each under its own conditions, or stay `auto`."""
    if backend != "auto":
        return [Resolution(backend, {}, ())]
    certain: list[Resolution] = []
    possible: list[Resolution] = []
    for fact in facts.query(SUBJECTS[op], "auto_resolves"):
        answer = _holds(fact, query)
        if answer is False or str(fact.value).startswith("not resolved"):
            continue
        open_conditions = {
            name: value for name, value in fact.when.items() if name not in question(query) and not name.startswith("cc")
        }
        hop = Hop(fact.file, fact.line, f"auto becomes {fact.value}")
        (certain if answer else possible).append(Resolution(str(fact.value), {} if answer else open_conditions, (hop,)))
    if certain:
        return certain[:1]
    return [*_distinct(possible), Resolution("auto", {"auto_left_unresolved": True} if op == "moe" else {}, ())]


def _holds(fact: Fact, query: Query) -> bool | None:
    asked = question(query)
    known = {name: value for name, value in fact.when.items() if name not in ("backend",)}
    return holds(known, asked)


def _distinct(found: list[Resolution]) -> list[Resolution]:
    """One resolution per value and deciding line, in the order of the facts: a rule may be stated by family and by architecture."""
    return list({(one.backend, one.hops): one for one in reversed(found)}.values())[::-1]


@dataclasses.dataclass(frozen=True)
class Rule:
    """One argument rule. archs: the architectures it is about, empty for all."""

    definition: Definition
    archs: tuple[str, ...]

    def applies(self, query: Query) -> bool:
        return not self.archs or query.model_arch in self.archs


def rules_of(reading: Reading, op: Operation) -> list[Rule]:
    """Rules that name the flag's field, in order of the members' names."""
    found = rules.functions(reading, FLAG_FIELDS[op])
    return [Rule(definition, tuple(_archs(reading, definition))) for definition in found]


def refusal(reading: Reading, rows: list[Rule], op: Operation, backend: str, query: Query) -> tuple[Refusal, Hop] | None:
    """The first argument rule that surely raises for this value; rules of other model architectures are left out."""
    scenario = _scenario(op, backend, query)
    for rule in rows:
        if not rule.applies(query) or not _can_refuse(rule.definition):
            continue
        raised = Walker(reading, scenario, Walk()).certain(reading.flow(rule.definition, scenario))
        if raised is not None and _surely_called(reading, rule.definition, scenario):
            why = f"argument rule {rule.definition.scope} refuses {FLAGS[op]} {backend}"
            return raised, Hop(raised.file, raised.line, why)
    return None


def _on_main_path(event: Event) -> bool:
    return not any(guard.holds for guard in event.guards)


@functools.lru_cache(maxsize=4096)
def _surely_called(reading: Reading, definition: Definition, scenario: Scenario, depth: int = 3) -> bool:
    """Whether some chain of callers reaches the rule whatever is not decided.

    A function that nobody calls by name is an entry, or registered somewhere, and taken as run. A call after `if dummy: return`
    is on the main path: those conditions are for starts without a model.
    """
    called = False
    for module in reading.index.modules(f"{definition.name}(".encode()):
        for caller in module.functions():
            if caller.name == definition.name or not _calls(caller, definition.name):
                continue
            called = True
            events = reading.flow(caller, scenario).of_kind("call")
            certain = any(event.dotted.rsplit(".", 1)[-1] == definition.name and _on_main_path(event) for event in events)
            if certain and (depth == 0 or _surely_called(reading, caller, scenario, depth - 1)):
                return True
    return not called


def open_checks(reading: Reading, rows: list[Rule], op: Operation, backend: str, query: Query) -> list[Gate]:
    """Checks that a rule makes for this value only and that the query does not decide."""
    scenario, unnamed = _scenario(op, backend, query), _scenario(op, "\0a value that no rule names", query)
    found = []
    for rule in rows:
        if not rule.applies(query) or not _can_refuse(rule.definition) or not _names(rule.definition, backend):
            continue
        common = {(event.kind, event.line) for event in reading.flow(rule.definition, unnamed).events}
        surely = _surely_called(reading, rule.definition, scenario)
        for event in reading.flow(rule.definition, scenario).of_kind("assert", "raise"):
            if (event.kind, event.line) not in common:
                asked = "" if surely else f"{rule.definition.name} being called: "
                found.append(Gate(f"depends on {asked}{said(event, event.guards)}", "depends", rule.definition.file, event.line))
    return found


@functools.cache
def _names(definition: Definition, word: str) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == word for node in ast.walk(definition.node))


def alias(reading: Reading, rows: list[Rule], op: Operation, backend: str, query: Query) -> tuple[dict[str, str], Hop] | None:
    """What a value that no enum has is rewritten to: {field: value}, and the line that does it."""
    scenario = _scenario(op, backend, query)
    for rule in rows:
        if not _names(rule.definition, backend):
            continue
        for event in reading.flow(rule.definition, scenario).of_kind("call"):
            given = {
                word.arg: word.value.value for word in event.node.keywords if word.arg and isinstance(word.value, ast.Constant)
            }
            fields = {name: value for name, value in given.items() if name.endswith("_backend") and isinstance(value, str)}
            if fields and not event.guards:
                said = ", ".join(f"{name}={value}" for name, value in fields.items())
                return fields, Hop(rule.definition.file, event.line, f"{backend} is an alias: {said}")
    return None


def _scenario(op: Operation, backend: str, query: Query) -> Scenario:
    return query.scenario(**{FLAG_FIELDS[op]: backend, "quantization": query.quant if query.flag_given else None})


@functools.cache
def _can_refuse(definition: Definition) -> bool:
    return any(isinstance(node, ast.Raise | ast.Assert) for node in ast.walk(definition.node))


def _archs(reading: Reading, definition: Definition) -> list[str]:
    """Architectures that a rule is about; a helper is about those of the rules of its module that call it."""
    own = rules.archs(reading, definition)
    if own:
        return own
    callers = (other for other in definition.module.definitions.values() if other.name != definition.name)
    return [arch for caller in callers if _calls(caller, definition.name) for arch in rules.archs(reading, caller)]


def _calls(caller: Definition, name: str) -> bool:
    """Whether a function or method calls `name(...)` or `self.name(...)`."""
    return name in _called_names(caller)


@functools.cache
def _called_names(caller: Definition) -> frozenset[str]:
    calls = (node.func for node in ast.walk(caller.node) if isinstance(node, ast.Call))
    return frozenset(name for func in calls if (name := getattr(func, "id", None) or getattr(func, "attr", None)))
