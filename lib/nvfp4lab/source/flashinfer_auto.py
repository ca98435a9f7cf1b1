"""What `backend="auto"` tries, in order: the heuristic function read path by path.

Every return gives one fact. Conditions that compare capability, CUDA or cuDNN version, or a boolean parameter become
`when`; the false side of a compound condition is `otherwise`; anything else is kept in the note as `depends on ...`.
"""

import ast
import dataclasses
from collections.abc import Iterator, Mapping

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flashinfer_conditions import expanded, single_assignments
from nvfp4lab.source.flashinfer_reader import Reader
from nvfp4lab.source.module import Definition

_COMPARISONS = {ast.GtE: ">=", ast.Gt: ">", ast.Lt: "<", ast.LtE: "<=", ast.Eq: "=="}
_FALSE_SIDE = {">=": "<", ">": "<=", "<": ">=", "<=": ">"}


@dataclasses.dataclass(frozen=True)
class Path:
    """One way through the heuristic: conditions taken (expression, truth) and what each local list holds."""

    taken: tuple[tuple[ast.expr, bool], ...] = ()
    lists: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def after(self, test: ast.expr, truth: bool) -> "Path":
        return dataclasses.replace(self, taken=(*self.taken, (test, truth)))


def facts(reader: Reader, subject: str, heuristic: Definition) -> Iterator[Fact]:
    """`auto_candidates` facts of one heuristic, in the order the source tries them."""
    walker = _Walker(reader, heuristic)
    said = set()
    for path, value, line in walker.walk(heuristic.node.body, Path()):
        when, unknown = walker.conditions(path)
        key = (value, line, str(when), tuple(unknown))
        if not value or key in said:
            continue
        said.add(key)
        note = "; ".join(f"depends on {text}" for text in unknown)
        yield reader.fact(
            subject, "auto_candidates", list(value), (heuristic.module, line), when=when, scope=heuristic.scope, note=note
        )


class _Walker:
    def __init__(self, reader: Reader, heuristic: Definition):
        self.reader, self.module = reader, heuristic.module
        self.values = single_assignments(heuristic.node)
        arguments = heuristic.node.args
        names = [argument.arg for argument in [*arguments.posonlyargs, *arguments.args]]
        self.suitable = names[0] if names else ""
        self.defaults = dict(zip(names[len(names) - len(arguments.defaults) :], arguments.defaults, strict=True))

    def walk(self, body: list[ast.stmt], path: Path) -> Iterator[tuple[Path, tuple[str, ...], int]]:
        """Yield (path, candidates, line of the return) for every return that can be reached."""
        for position, node in enumerate(body):
            rest = body[position + 1 :]
            if isinstance(node, ast.Return):
                value = self.candidates(node.value, path)
                if value is not None:
                    yield path, value, node.lineno
                return
            if isinstance(node, ast.If) and self.only_filters(node):
                yield from self.walk(node.body + rest, path)
                return
            if isinstance(node, ast.If):
                for alternative in _alternatives(expanded(node.test, self.values)):
                    yield from self.walk(node.body + rest, path.after(alternative, True))
                yield from self.walk(node.orelse + rest, path.after(node.test, False))
                return
            path = self.assigned(node, path)

    def only_filters(self, node: ast.If) -> bool:
        """`if "x" in suitable_backends: candidates += x`: all lists are filtered by suitability, so this adds nothing to `when`."""
        parts = _conjuncts(node.test)
        plain = not node.orelse and not any(isinstance(inner, ast.Return) for inner in ast.walk(node))
        return plain and all(self.is_suitability(part) for part in parts)

    def is_suitability(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Name):
            return node.id.endswith("_AVAILABLE")
        return (
            isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In) and ast.unparse(node.comparators[0]) == self.suitable
        )

    def assigned(self, node: ast.stmt, path: Path) -> Path:
        """`path` after an assignment to a local list or an `.append` to one."""
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name, value = node.targets[0].id, self.candidates(node.value, path)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and isinstance(node.value.func, ast.Attribute):
            name = ast.unparse(node.value.func.value)
            added = self.reader.literal(self.module, node.value.args[0]) if len(node.value.args) == 1 else None
            known = name in path.lists and node.value.func.attr == "append" and isinstance(added, str)
            value = (*path.lists[name], added) if known else None
        else:
            return path
        kept = {key: held for key, held in path.lists.items() if key != name}
        return dataclasses.replace(path, lists=kept if value is None else {**kept, name: value})

    def candidates(self, node: ast.expr | None, path: Path) -> tuple[str, ...] | None:
        """Backend names of a list expression: literal, local list, either of them filtered by a comprehension, or extended."""
        if isinstance(node, ast.ListComp) and len(node.generators) == 1:
            return self.candidates(node.generators[0].iter, path)
        if isinstance(node, ast.Name) and node.id in path.lists:
            return path.lists[node.id]
        if isinstance(node, ast.List | ast.Tuple):
            parts: list[str] = []
            for element in node.elts:
                inner = (
                    self.candidates(element.value, path)
                    if isinstance(element, ast.Starred)
                    else self.reader.literal(self.module, element)
                )
                if inner is None:
                    return None
                parts.extend([inner] if isinstance(inner, str) else inner)
            return tuple(parts) if all(isinstance(part, str) for part in parts) else None
        value = self.reader.literal(self.module, node)
        return tuple(value) if isinstance(value, list) and all(isinstance(part, str) for part in value) else None

    def conditions(self, path: Path) -> tuple[dict, list[str]]:
        """(`when`, conditions that could not be put into it) of one path."""
        when: dict = {}
        unknown: list[str] = []
        for test, truth in path.taken:
            for atom, side in _atoms(expanded(test, self.values), truth):
                said = self.atom(atom, side)
                if said is None:
                    unknown.append(("" if side else "not ") + f"({ast.unparse(atom)})")
                else:
                    when = _merged(when, said)
        return when, unknown

    def atom(self, node: ast.expr, truth: bool) -> dict | None:
        """`when` entry of one condition; {} when it says nothing new; None when it is not understood."""
        if capability := _capability(node):
            return {"cc": [capability]} if truth else {"cc_not_in": [capability]}
        if isinstance(node, ast.BoolOp):  # the false side of `A and B`, the true side of `A or B`
            return {"otherwise": True}
        if isinstance(node, ast.Name):
            default = self.defaults.get(node.id)
            if isinstance(default, ast.Constant) and isinstance(default.value, bool):
                return {} if default.value is truth is False else {node.id: truth}
            return {} if truth and node.id.endswith("_AVAILABLE") else None
        return self.comparison(node, truth) if isinstance(node, ast.Compare) and len(node.ops) == 1 else None

    def comparison(self, node: ast.Compare, truth: bool) -> dict | None:
        sign = _COMPARISONS.get(type(node.ops[0]))
        left, right = ast.unparse(node.left), self.version_of(node.comparators[0])
        subject = "cudnn" if "cudnn" in left.lower() else "cuda" if "cuda_version" in left else None
        if subject and sign and right is not None:
            if not truth and sign not in _FALSE_SIDE:
                return None
            return {subject: f"{sign if truth else _FALSE_SIDE[sign]}{right}"}
        return None

    def version_of(self, node: ast.expr) -> str | None:
        """`13`, `Version("12.9")`, or a module constant that is one of these, as text."""
        if isinstance(node, ast.Name) and (found := self.reader.constant(self.module, node.id)):
            node = found[1]
        if isinstance(node, ast.Call) and node.args:
            node = node.args[0]
        return str(node.value) if isinstance(node, ast.Constant) else None


def _conjuncts(test: ast.expr) -> list[ast.expr]:
    return test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]


def _alternatives(test: ast.expr) -> list[ast.expr]:
    """Tests that together say `test`, each without `X if flag else Y`: one for the flag's either side."""
    parts = _conjuncts(test)
    for position, part in enumerate(parts):
        if isinstance(part, ast.IfExp):
            sides = ([part.test, part.body], [ast.UnaryOp(ast.Not(), part.test), part.orelse])
            return [
                found
                for side in sides
                for found in _alternatives(ast.BoolOp(ast.And(), [*parts[:position], *side, *parts[position + 1 :]]))
            ]
    return [test]


def _atoms(test: ast.expr, truth: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Conditions that must all hold; a capability test `major == 12 and minor == 0` stays whole."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _atoms(test.operand, not truth)
    elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) is truth and _capability(test) is None:
        for value in test.values:
            yield from _atoms(value, truth)
    else:
        yield test, truth


def _capability(node: ast.expr) -> int | None:
    """120 for `major == 12 and minor == 0` after expansion (`get_compute_capability(...)[0] == 12 and ...[1] == 0`)."""
    if not (isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And) and len(node.values) == 2):
        return None
    parts = []
    for value in node.values:
        if not (
            isinstance(value, ast.Compare) and isinstance(value.ops[0], ast.Eq) and isinstance(value.comparators[0], ast.Constant)
        ):
            return None
        if "capability" not in ast.unparse(value.left):
            return None
        parts.append(value.comparators[0].value)
    return int(parts[0]) * 10 + int(parts[1])


def _merged(when: dict, said: dict) -> dict:
    """`when` with `said` added; lists of excluded capabilities grow."""
    result = dict(when)
    for key, value in said.items():
        result[key] = [*result.get(key, []), *value] if key == "cc_not_in" else value
    return result
