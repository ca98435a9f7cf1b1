"""Checks of the server's arguments: which quantisations, layouts and combinations a backend allows, and what raises.

Each rule function is read once per backend value that it names and once for a value that it does not name. What happens
only for the named value is a condition of that backend.
"""

import ast
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flow import Event, Guard
from nvfp4lab.source.module import Definition
from nvfp4lab.source.sglang import rules
from nvfp4lab.source.sglang.reading import Reading, chain, condition, spot
from nvfp4lab.source.values import Scenario

_UNNAMED = "\0a value that no rule names"
_SHORT = {"moe_runner_backend": "runner"}
_NOT_CONDITIONS = {"self", "model_arch"}


def read(reading: Reading) -> Iterator[Fact]:
    yield from _backend_checks(reading, "moe_runner", "moe_runner_backend", "moe")
    yield from _backend_checks(reading, "moe_a2a", "moe_a2a_backend", "moe_a2a")
    yield from _quantization_checks(reading)


def _backend_checks(reading: Reading, enum_subject: str, field: str, prefix: str) -> Iterator[Fact]:
    enum = reading.vocabulary.enums.get(enum_subject)
    if enum is None:
        return
    for definition in rules.functions(reading, field):
        for value, events in _only_for(reading, definition, field, rules.literals(definition, enum.members.values())):
            for event in events:
                yield from _event_facts(reading, definition, event, f"{prefix}:{value}")


def _only_for(reading: Reading, definition: Definition, field: str, values: list[str]) -> Iterator[tuple[str, list[Event]]]:
    """Asserts, raises and settings that happen for each value and not for a value that no rule names."""
    kinds = ("assert", "raise", "set")
    if not values or not any(isinstance(node, ast.Assert | ast.Raise | ast.Assign) for node in ast.walk(definition.node)):
        return
    other = reading.flow(definition, Scenario.of(None, **{field: _UNNAMED}))
    common = {(event.kind, event.line) for event in other.events}
    for value in values:
        named = reading.flow(definition, Scenario.of(None, **{field: value}))
        yield value, [event for event in named.of_kind(*kinds) if (event.kind, event.line) not in common]


def _event_facts(reading: Reading, definition: Definition, event: Event, subject: str) -> Iterator[Fact]:
    if event.kind == "assert":
        yield from _assert_facts(reading, definition, event, subject)
    elif event.kind == "raise":
        value = f"{condition(event)} -> {event.dotted}"
        yield _checked(reading, definition, event, subject, "raises_on", value)
    elif "." in event.dotted and isinstance(event.value, bool | str | int) and _is_side_effect(event, subject):
        name = event.dotted.rsplit(".", 1)[-1]
        text = f"{name}={event.value}"
        yield _checked(reading, definition, event, subject, "side_effect", text)
        if "topk" in _log_after(definition, event) and subject.startswith("moe:"):
            yield _checked(reading, definition, event, subject.replace("moe:", "topk:", 1), "side_effect", text)


def _is_side_effect(event: Event, subject: str) -> bool:
    """Settings of other fields by a backend that was chosen; what `auto` becomes is told by `moe_auto`."""
    is_choice = event.dotted.endswith(("moe_runner_backend", "moe_a2a_backend"))
    return not is_choice and subject.split(":")[1] not in ("auto", "none")


def _assert_facts(reading: Reading, definition: Definition, event: Event, subject: str) -> Iterator[Fact]:
    test = event.node.test
    words = ast.unparse(test)
    allowed = _allowed(test, "quantization")
    if allowed is not None:
        note = "" if isinstance(test, ast.Compare) else f"or {words}"
        yield _checked(reading, definition, event, subject, "allowed_quantization", allowed, note)
    yield _checked(reading, definition, event, subject, "requires", _requirement_text(test))
    if "ep_size" in words:
        yield _checked(reading, definition, event, subject, "requires_ep", _requirement_text(test))
    if "dp_size" in words or "tp_size ==" in words:
        yield _checked(reading, definition, event, subject, "requires_topology", _requirement_text(test))


def _checked(
    reading: Reading, definition: Definition, event: Event, subject: str, predicate: str, value: object, note: str = ""
) -> Fact:
    when = literal_conditions(event.guards)
    if subject.startswith("moe_a2a:"):
        when.pop("a2a", None)
    spots = chain(event)
    return reading.fact(subject, predicate, value, spot(event), when=when, also=spots, scope=definition.scope, note=note)


def _quantization_checks(reading: Reading) -> Iterator[Fact]:
    """Rules about one quantisation method: what it raises on, which MoE runners it allows."""
    for definition in rules.functions(reading, "quantization", "moe_runner_backend"):
        for value, events in _only_for(reading, definition, "quantization", _fp4_words(definition)):
            for event in (event for event in events if event.kind == "raise"):
                yield from _quantization_raise(reading, definition, event, value)


def _fp4_words(definition: Definition) -> list[str]:
    words = (node.value for node in ast.walk(definition.node) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return list(
        dict.fromkeys(word for word in words if "fp4" in word and word.replace("_", "").isalnum() and "flashinfer" not in word)
    )


def _quantization_raise(reading: Reading, definition: Definition, event: Event, value: str) -> Iterator[Fact]:
    subject = f"quant:{value}"
    spots = chain(event)
    last = event.guards[-1] if event.guards else None
    allowed = _refused_complement(last) if last else None
    if last is not None and allowed is not None:
        place = (definition.file, last.line)
        yield reading.fact(subject, "allowed_moe_runner", allowed, place, also=spots, scope=definition.scope)
    text = f"{condition(event)} -> {event.dotted}"
    yield reading.fact(
        subject, "raises_on", text, spot(event), when=literal_conditions(event.guards), also=spots, scope=definition.scope
    )


def _refused_complement(guard: Guard) -> list | None:
    """The list of `if runner not in [...]: raise`, also where further conjuncts follow."""
    for node in ast.walk(guard.test):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotIn) and "moe_runner_backend" in ast.unparse(node.left):
            return _constants(node.comparators[0])
    return None


def _allowed(test: ast.expr, field: str) -> list | None:
    """The list of `X.field in [...]`, possibly one alternative of several."""
    parts = test.values if isinstance(test, ast.BoolOp) else [test]
    for part in parts:
        if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.In) and ast.unparse(part.left).endswith(f".{field}"):
            return _constants(part.comparators[0])
    return None


def _constants(node: ast.expr) -> list | None:
    if isinstance(node, ast.List | ast.Tuple | ast.Set) and all(isinstance(item, ast.Constant) for item in node.elts):
        return [item.value for item in node.elts]
    return None


def literal_conditions(guards: tuple[Guard, ...]) -> dict[str, object]:
    """`when` entries of conditions that compare one field with one literal."""
    found: dict[str, object] = {}
    for guard in guards:
        for part in guard.undecided if guard.holds else ():
            if isinstance(part, ast.Compare) and len(part.ops) == 1 and isinstance(part.ops[0], ast.Eq):
                literal = part.comparators[0]
                name = ast.unparse(part.left).rsplit(".", 1)[-1]
                if isinstance(literal, ast.Constant) and name.isidentifier() and name not in _NOT_CONDITIONS:
                    found["a2a" if "a2a" in name and "mode" not in name else _SHORT.get(name, name)] = literal.value
    return found


def _requirement_text(test: ast.expr) -> str:
    """The requirement in short: objects that fields are read from are left out."""
    words = " ".join(ast.unparse(test).split())
    for noise in ("resolved_view(self).", "resolved_view(server_args).", "server_args.", "self.", "view.", "cfg."):
        words = words.replace(noise, "")
    return words.replace("moe_a2a_backend", "a2a").replace("'", "")


def _log_after(definition: Definition, event: Event) -> str:
    """The message that explains a setting: the string constants of the statements around it."""
    lines = definition.module.lines
    return " ".join(lines[max(event.line - 6, 0) : event.line + 6])
