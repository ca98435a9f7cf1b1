"""Command line: choices, flag names and defaults of the backend fields of ServerArgs, in every style it was written in.

Styles: dataclass fields with `parser.add_argument(...)`, and `name: A[type, Arg(choices=..., cli_name=...), ...] = default`
in one class or spread over several.
"""

import ast
import dataclasses
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.module import Definition, Module, statements
from nvfp4lab.source.sglang.reading import Reading, Spot
from nvfp4lab.source.sglang.vocabulary import ENUMS

# further fields whose choices or defaults decide a route: subject -> ServerArgs field
_MORE_FIELDS = {"speculative_moe_runner": "speculative_moe_runner_backend", "speculative_moe_a2a": "speculative_moe_a2a_backend"}


@dataclasses.dataclass(frozen=True)
class Choices:
    """A list of accepted values. spot: where the list begins; also: where the field uses it."""

    values: tuple[str, ...]
    spot: Spot
    also: tuple[Spot, ...] = ()


def read(reading: Reading) -> Iterator[Fact]:
    fields = {subject: field for subject, (_, field) in ENUMS.items()} | _MORE_FIELDS
    for subject, field in fields.items():
        declared = [(module, owner, node) for module, owner, node in _declarations(reading, field)]
        if not declared:
            yield reading.not_found(subject, "default", f"field {field}: ... of ServerArgs", "all classes of the package")
            continue
        yield from _default(reading, subject, declared)
        yield from _command_line(reading, subject, field, declared)


def _declarations(reading: Reading, field: str) -> list[tuple[Module, str, ast.AnnAssign]]:
    """Annotated assignments of `field` in class bodies; those that carry `Arg(...)` or stand in ServerArgs itself."""
    found = []
    for module in reading.index.modules(f"{field}:".encode()):
        for definition in module.definitions.values():
            if not isinstance(definition.node, ast.ClassDef):
                continue
            for node in definition.node.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == field and node.value:
                    is_argument = _argument_call(node) is not None or definition.name == "ServerArgs"
                    found += [(module, definition.name, node)] if is_argument else []
    return found


def _argument_call(node: ast.AnnAssign) -> ast.Call | None:
    """The `Arg(...)` inside an `A[type, Arg(...), ...]` annotation."""
    parts = (
        node.annotation.slice.elts
        if isinstance(node.annotation, ast.Subscript) and isinstance(node.annotation.slice, ast.Tuple)
        else []
    )
    return next(
        (part for part in parts if isinstance(part, ast.Call) and any(k.arg in ("help", "choices") for k in part.keywords)), None
    )


def _default(reading: Reading, subject: str, declared: list[tuple[Module, str, ast.AnnAssign]]) -> Iterator[Fact]:
    module, owner, node = declared[0]
    if isinstance(node.value, ast.Constant):
        at = (module.member, node.value.lineno)
        yield reading.fact(subject, "default", node.value.value, at, also=[(module.member, node.lineno)], scope=owner)


def _command_line(reading: Reading, subject: str, field: str, declared: list[tuple[Module, str, ast.AnnAssign]]) -> Iterator[Fact]:
    choices: Choices | None = None
    flag: tuple[str, Spot] | None = None
    for module, _, node in declared:
        if call := _argument_call(node):
            words = {keyword.arg: keyword.value for keyword in call.keywords}
            choices = choices or _choices(reading, module, words.get("choices"), (module.member, node.lineno))
            if isinstance(name := words.get("cli_name"), ast.Constant):
                flag = flag or (name.value, (module.member, name.lineno))
            flag = flag or (f"--{field.replace('_', '-')}", (module.member, node.lineno))
    for definition, call in _add_argument_calls(reading, field):
        words = {keyword.arg: keyword.value for keyword in call.keywords}
        choices = choices or _choices(reading, definition.module, words.get("choices"), (definition.file, call.lineno))
        flag = flag or (call.args[0].value, (definition.file, call.args[0].lineno))
    if choices:
        note = _extendable(reading, choices)
        yield reading.fact(subject, "cli_choices", list(choices.values), choices.spot, also=choices.also, note=note)
    if flag:
        yield reading.fact(subject, "cli_flag", flag[0], flag[1])


def _add_argument_calls(reading: Reading, field: str) -> Iterator[tuple[Definition, ast.Call]]:
    """`parser.add_argument("--name", dest=field)`, or without dest where the name gives the field."""
    for module in reading.index.modules(b"add_argument", field.encode()):
        for definition in module.functions():
            if "args" not in definition.name:
                continue
            for call in ast.walk(definition.node):
                if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".add_argument") and _destination(call) == field:
                    yield definition, call


def _destination(call: ast.Call) -> str | None:
    dest = next((keyword.value for keyword in call.keywords if keyword.arg == "dest"), None)
    if isinstance(dest, ast.Constant):
        return dest.value
    first = call.args[0] if call.args else None
    return first.value.lstrip("-").replace("-", "_") if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def _choices(reading: Reading, module: Module, node: ast.expr | None, used_at: Spot) -> Choices | None:
    """The list behind `choices=`: written out, or a constant of this or an imported module."""
    if node is None:
        return None
    if isinstance(node, ast.List | ast.Tuple):
        values = tuple(item.value for item in node.elts if isinstance(item, ast.Constant))
        return Choices(values, (module.member, node.lineno), (used_at,)) if values else None
    if not isinstance(node, ast.Name):
        return None
    for holder in _holders(reading, module, node.id):
        for assigned in holder.constants.get(node.id, ()):
            if found := _choices(reading, holder, assigned.value, used_at):
                return Choices(found.values, (holder.member, assigned.lineno), (used_at,))
    return None


def _holders(reading: Reading, module: Module, name: str) -> Iterator[Module]:
    yield module
    for target in sorted(module.imports.get(name, ())):
        if found := reading.index.by_dotted(target.dotted.rpartition(".")[0]):
            yield found


def _extendable(reading: Reading, choices: Choices) -> str:
    """Said when some function or bound method extends the list at run time: the list is then a lower bound."""
    holder = reading.index.module(choices.spot[0])
    name = holder.line_text(choices.spot[1]).split("=")[0].split(":")[0].strip() if holder else ""
    if not name.isidentifier():
        return ""
    extends = any(
        isinstance(node, ast.Attribute) and node.attr == "extend" and isinstance(node.value, ast.Name) and node.value.id == name
        for statement in statements(holder.tree.body)
        for node in ast.walk(statement)
    )
    return "extendable at run time, so this is a lower bound" if extends else ""
