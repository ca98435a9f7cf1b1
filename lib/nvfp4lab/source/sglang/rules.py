"""Functions that resolve or check the server's arguments, in every style they were written in.

Methods of ServerArgs, hooks that take `server_args`, override providers that return a dict, post-process passes over a
view: all read fields by name from one of these parameters. For a function, `archs` are the model architectures it is
about: from a registering decorator, or from the conditions on the way.
"""

import ast
import copy
import dataclasses
import functools
from collections.abc import Iterable, Iterator

from nvfp4lab.source.flow import Event, Guard
from nvfp4lab.source.module import Definition
from nvfp4lab.source.sglang.reading import Reading

_PARAMETERS = {"server_args", "view", "cfg", "args"}
_ARCH_WORDS = ("model_arch", "architectures", "architecture")


def functions(reading: Reading, *fields: str, word: bytes = b"") -> list[Definition]:
    """Rule functions that name every field (as an attribute, dict key or keyword), in modules that mention `word`."""
    index = reading.index
    about_arguments = {member for name in (b"server_args", b"ServerArgs") for member in index.mentioning(name)}
    words = [*([word] if word else []), *(field.encode() for field in fields)]
    modules = [index.module(member) for member in index.mentioning(*words) if member in about_arguments]
    rules = [definition for module in modules if module for definition in module.functions() if _is_rule(definition)]
    return [definition for definition in rules if all(names_field(definition, field) for field in fields)]


def sliced(definition: Definition, field: str) -> Definition:
    """The same function without the statements that cannot matter to `field`: handlers of a thousand lines are read for
    a hundred scenarios. Kept: what names the field or may return, and assignments of names that kept conditions read."""
    needed = {field}
    while True:
        body = _kept(definition.node.body, needed)
        tests = [node.test for statement in body for node in ast.walk(statement) if isinstance(node, ast.If)]
        read = {node.id for test in tests for node in ast.walk(test) if isinstance(node, ast.Name)}
        if read <= needed:
            break
        needed |= read
    node = copy.copy(definition.node)
    node.body = body or definition.node.body
    return dataclasses.replace(definition, node=node)


def _kept(body: list[ast.stmt], needed: set[str]) -> list[ast.stmt]:
    kept = []
    for node in body:
        if not any(_matters(inner, needed) for inner in ast.walk(node)):
            continue
        if isinstance(node, ast.If):
            node = copy.copy(node)
            node.body = _kept(node.body, needed) or [ast.copy_location(ast.Pass(), node)]
            node.orelse = _kept(node.orelse, needed)
        kept.append(node)
    return kept


def _matters(node: ast.AST, needed: set[str]) -> bool:
    if isinstance(node, ast.Return | ast.Raise):
        return True
    if isinstance(node, ast.Name):
        return isinstance(node.ctx, ast.Store) and node.id in needed
    named = node.attr if isinstance(node, ast.Attribute) else node.arg if isinstance(node, ast.keyword) else None
    return (named or (node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None)) in needed


def _is_rule(definition: Definition) -> bool:
    arguments = {argument.arg for argument in definition.node.args.args}
    return definition.scope.startswith("ServerArgs.") or bool(arguments & _PARAMETERS)


def names_field(definition: Definition, field: str) -> bool:
    """Whether a function reads or writes `field`: in its text first, for most functions do not even mention it."""
    node = definition.node
    if not any(field in line for line in definition.module.lines[node.lineno - 1 : node.end_lineno]):
        return False
    return any(
        (isinstance(node, ast.Attribute) and node.attr == field)
        or (isinstance(node, ast.Constant) and node.value == field)
        or (isinstance(node, ast.keyword) and node.arg == field)
        for node in ast.walk(definition.node)
    )


def literals(definition: Definition, among: Iterable[str]) -> list[str]:
    """String constants of the function that are among the given words, in order of appearance."""
    wanted = set(among)
    found = (node.value for node in ast.walk(definition.node) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return list(dict.fromkeys(value for value in found if value in wanted))


def archs(reading: Reading, definition: Definition, event: Event | None = None) -> list[str]:
    """Model architectures that a rule (or one event of it) is about; empty when it is about all."""
    named = [arch for guard in (event.guards if event else ()) for arch in archs_of_guard(reading, definition, guard)]
    if named:
        return named
    decorated = [
        argument.value
        for mark in definition.node.decorator_list
        if isinstance(mark, ast.Call)
        for argument in mark.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    return decorated or list(_archs_of_callers(reading, definition))


def archs_of_guard(reading: Reading, definition: Definition, guard: Guard) -> list[str]:
    """Architectures that a condition admits: `arch in [...]`, `arch == ".."`, or the negation of `arch not in [...]`."""
    parts = guard.test.values if isinstance(guard.test, ast.BoolOp) and isinstance(guard.test.op, ast.And) else [guard.test]
    found: list[str] = []
    for part in parts if guard.holds else [guard.test]:
        if not isinstance(part, ast.Compare) or not any(word in ast.unparse(part.left) for word in _ARCH_WORDS):
            continue
        admits = isinstance(part.ops[0], ast.In | ast.Eq) if guard.holds else isinstance(part.ops[0], ast.NotIn | ast.NotEq)
        found += _strings(reading, definition, part.comparators[0]) if admits else []
    return found


def is_about_archs(node: ast.expr) -> bool:
    words = ast.unparse(node)
    return any(word in words for word in _ARCH_WORDS)


def _strings(reading: Reading, definition: Definition, node: ast.expr) -> list[str]:
    """String members of a literal or constant collection; sets and frozensets included."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) else []
    if isinstance(node, ast.Call) and node.args:
        return _strings(reading, definition, node.args[0])
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return [text for item in node.elts for text in _strings(reading, definition, item)]
    if isinstance(node, ast.Name):
        for module in _modules_of(reading, definition, node.id):
            for assigned in module.constants.get(node.id, ()):
                if found := _strings(reading, definition, assigned.value):
                    return found
    return []


def _modules_of(reading: Reading, definition: Definition, name: str) -> Iterator:
    yield definition.module
    for target in sorted(definition.imports.get(name, ())):
        if found := reading.index.by_dotted(target.dotted.rpartition(".")[0]):
            yield found


def _archs_of_callers(reading: Reading, definition: Definition) -> Iterator[str]:
    """A hook without own conditions is about the architectures of the branch that calls it."""
    if "." in definition.scope:
        return
    for module in reading.index.modules(definition.name.encode(), b"model_arch"):
        for caller in module.functions():
            if caller.name == definition.name:
                continue
            for branch in (node for node in ast.walk(caller.node) if isinstance(node, ast.If)):
                calls = [node for statement in branch.body for node in ast.walk(statement) if isinstance(node, ast.Call)]
                if any(ast.unparse(call.func).rsplit(".", 1)[-1] == definition.name for call in calls):
                    found = archs_of_guard(reading, caller, Guard(branch.test, True, branch.lineno))
                    if found:
                        yield from found
                        return


@functools.cache
def family(arch: str) -> str:
    """The name by which users know the family of an architecture: its stem, or the name in FAMILIES."""
    stem = arch.split("For")[0]
    return FAMILIES.get(stem, stem)


# One implementation serves several families; this is what users call it.
FAMILIES = {"DeepseekV3": "DeepSeek-V3/V3.2/Kimi"}
