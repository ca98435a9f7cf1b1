"""Facts from FlashInfer's two decorators, and whether what they say is enforced.

`@supported_compute_capability([...])` alone only notes a list on the function; nothing looks at it.
`@backend_requirement({backend: check}, common_check=..., heuristic_func=...)` calls the checks before the operation, so the
lists on those checks are enforced. The two are joined here through the names in the dict, across modules.
"""

import ast
from collections.abc import Iterator

from nvfp4lab.source import flashinfer_auto
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flashinfer_conditions import (
    exception_of,
    expanded,
    guards,
    message_of,
    requirement,
    single_assignments,
)
from nvfp4lab.source.flashinfer_reader import Reader
from nvfp4lab.source.module import Definition, FunctionNode

_NOTES = "supported_compute_capability"
_ENFORCES = "backend_requirement"


def facts(reader: Reader) -> Iterator[Fact]:
    """Capability, backend, requirement and auto facts of every decorated operation."""
    for definition in reader.operations():
        if not is_on_topic(definition):
            continue
        enforcing = _decorator(definition, _ENFORCES)
        if isinstance(enforcing, ast.Call):
            yield from _enforced(reader, definition, enforcing)
        elif _decorator(definition, _NOTES) is not None and not _is_check(definition):
            yield from _noted(reader, definition)
    yield from _semantics(reader)


def is_on_topic(definition: Definition) -> bool:
    """Whether the text of a function, or the name of its class, speaks of FP4 or MoE."""
    first = min([definition.line, *(node.lineno for node in definition.node.decorator_list)])
    text = "\n".join([definition.scope, *definition.module.lines[first - 1 : definition.node.end_lineno]]).lower()
    return "fp4" in text or "moe" in text


def is_public(definition: Definition) -> bool:
    """Whether callers are meant to use it: an API or requirement decorator, and no leading underscore."""
    decorators = " ".join(ast.unparse(node) for node in definition.node.decorator_list)
    return not definition.name.startswith("_") and ("flashinfer_api" in decorators or _ENFORCES in decorators)


def operation_name(definition: Definition) -> str:
    """The name a caller uses: the function, `Class.method`, or the class for its `__init__`."""
    owner, _, method = definition.scope.rpartition(".")
    return owner if method == "__init__" else definition.scope


def _is_check(definition: Definition) -> bool:
    """Requirement functions are private by convention; they are reported under the operation that names them."""
    return definition.name.startswith("_") and definition.name != "__init__"


def _decorator(definition: Definition, name: str) -> ast.expr | None:
    for node in definition.node.decorator_list:
        target = node.func if isinstance(node, ast.Call) else node
        if (isinstance(target, ast.Name) and target.id == name) or (isinstance(target, ast.Attribute) and target.attr == name):
            return node
    return None


def _noted_list(reader: Reader, definition: Definition) -> tuple[object, int] | None:
    """(capabilities, line) that a function notes; the source text where the list is not constant."""
    node = _decorator(definition, _NOTES)
    if not isinstance(node, ast.Call) or not node.args:
        return None
    value = reader.literal(definition.module, node.args[0])
    return (value if isinstance(value, list) else f"depends on {ast.unparse(node.args[0])}"), node.lineno


def _noted(reader: Reader, definition: Definition) -> Iterator[Fact]:
    found = _noted_list(reader, definition)
    if found is None:
        return
    name, at = operation_name(definition), (definition.module, found[1])
    chain = {"also": [(definition.module, definition.line)], "scope": definition.scope}
    yield reader.fact(name, "supported_cc", found[0], at, note="annotation only: nothing checks it before the call", **chain)
    yield reader.fact(name, "enforced", False, at, **chain)
    yield from _requirements(reader, name, definition)


def _enforced(reader: Reader, definition: Definition, decorator: ast.Call) -> Iterator[Fact]:
    name, at = operation_name(definition), (definition.module, decorator.lineno)
    given = dict(zip(("backend_checks", "common_check", "heuristic_func"), decorator.args, strict=False))
    given.update({keyword.arg: keyword.value for keyword in decorator.keywords if keyword.arg})
    chain = {"also": [(definition.module, definition.line)], "scope": definition.scope}
    checks = _checks(reader, definition, given.get("backend_checks"))
    yield reader.fact(name, "enforced", True, at, **chain)
    if checks:
        yield reader.fact(name, "backends", list(checks), at, **chain)
    for backend, check in checks.items():
        yield from _check_facts(reader, f"{name}:{backend}", definition, check)
    if "common_check" in given:
        yield from _check_facts(reader, name, definition, given["common_check"])
    heuristic = given.get("heuristic_func")
    if isinstance(heuristic, ast.Name) and (found := reader.function(definition.module, heuristic.id)):
        yield from flashinfer_auto.facts(reader, f"{name}:auto", found)


def _checks(reader: Reader, definition: Definition, node: ast.expr | None) -> dict[str, ast.expr]:
    """Backend -> check expression of the decorator's dict, which may be the name of a dict at module level."""
    if isinstance(node, ast.Name):
        found = reader.constant(definition.module, node.id)
        node = found[1] if found else None
    if not isinstance(node, ast.Dict):
        return {}
    return {str(key.value): value for key, value in zip(node.keys, node.values, strict=True) if isinstance(key, ast.Constant)}


def _check_facts(reader: Reader, subject: str, operation: Definition, check: ast.expr) -> Iterator[Fact]:
    found = reader.function(operation.module, check.id) if isinstance(check, ast.Name) else None
    if found is None or isinstance(found.node, ast.ClassDef):
        note = f"the check is {ast.unparse(check)}, which is not a function that this package defines"
        yield reader.fact(subject, "supported_cc", "not found", (operation.module, check.lineno), scope=operation.scope, note=note)
        return
    listed = _noted_list(reader, found)
    if listed is not None:
        also = [(found.module, found.line), (operation.module, check.lineno)]
        note = "enforced by backend_requirement"
        yield reader.fact(subject, "supported_cc", listed[0], (found.module, listed[1]), also=also, scope=found.scope, note=note)
    yield from _requirements(reader, subject, found)


def _requirements(reader: Reader, subject: str, definition: Definition) -> Iterator[Fact]:
    """One `requires` fact per guard that raises; divisibility of K and N also as `requires_k` and `requires_n`."""
    values = single_assignments(definition.node)
    constants = definition.module.constants
    for node, outer in guards(definition.node.body):
        raised = node.body[-1]
        given = f" when {' and '.join(outer)}" if outer else ""
        text = f"{requirement(node.test)}{given} ({exception_of(raised)}: {message_of(raised)})"
        also = [(definition.module, raised.lineno)]
        names = {inner.id for inner in ast.walk(node.test) if isinstance(inner, ast.Name)}
        also += [(definition.module, constants[name][0].lineno) for name in sorted(names & constants.keys())]
        at = (definition.module, node.lineno)
        predicates = ["requires", *(f"requires_{axis}" for axis in _divisible_axes(expanded(node.test, values)))]
        for predicate in predicates:
            yield reader.fact(subject, predicate, text, at, also=also, scope=definition.scope)


def _divisible_axes(test: ast.expr) -> list[str]:
    """Axes whose divisibility a test is about. Operand `a` is [M, K/2], `b` is [K/2, N] column-major."""
    axes = []
    for node in ast.walk(test):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            text = ast.unparse(node.left).lower()
            if text in ("k", "real_k") or "a.shape[1]" in text or "b.shape[0]" in text:
                axes.append("k")
            if text == "n" or "b.shape[1]" in text:
                axes.append("n")
    return axes


def _semantics(reader: Reader) -> Iterator[Fact]:
    """What the noting decorator does by itself: where its inner function returns what it was given, nothing is enforced."""
    for outer in reader.index.functions(_NOTES):
        inner = next((node for node in outer.node.body if isinstance(node, FunctionNode)), None)
        if inner is None:
            continue
        given = inner.args.args[0].arg
        stores = [node for node in ast.walk(inner) if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute)]
        last = inner.body[-1]
        unchanged = isinstance(last, ast.Return) and isinstance(last.value, ast.Name) and last.value.id == given
        at = stores[0] if stores else inner
        sets = f" (sets {ast.unparse(stores[0].targets[0])})" if stores else ""
        said = f"annotation only{sets}; not enforced by itself" if unchanged else "wraps the function; it may enforce"
        also = [(outer.module, outer.line)]
        yield reader.fact(_NOTES, "semantics", said, (outer.module, at.lineno), also=also, scope=f"{outer.scope}.{inner.name}")
