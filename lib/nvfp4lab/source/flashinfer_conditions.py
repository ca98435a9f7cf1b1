"""Conditions as FlashInfer writes them, turned into the requirement a caller must meet and into `when` of a fact.

A guard `if n % 8 != 0: raise` is read as the requirement `n % 8 == 0`. Local names are replaced by what they were assigned,
so that `real_k % 32` is known to be about K.
"""

import ast
import copy
from collections.abc import Callable, Iterator

from nvfp4lab.source.module import FunctionNode

_OPPOSITE = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}


def negated(test: ast.expr) -> ast.expr:
    """The condition that holds exactly when `test` does not (De Morgan over and/or/not and single comparisons)."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    if isinstance(test, ast.BoolOp):
        op = ast.Or() if isinstance(test.op, ast.And) else ast.And()
        return ast.BoolOp(op, [negated(value) for value in test.values])
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return ast.Compare(test.left, [_OPPOSITE[type(test.ops[0])]()], test.comparators)
    return ast.UnaryOp(ast.Not(), test)


def requirement(test: ast.expr) -> str:
    """Text of what must hold so that a guard with this `test` does not refuse."""
    return ast.unparse(ast.fix_missing_locations(negated(test)))


def single_assignments(function: FunctionNode) -> dict[str, ast.expr]:
    """Local names of `function` that are assigned exactly once, with their value; `a, b = x` gives `x[0]`, `x[1]`."""
    seen: dict[str, list[ast.expr]] = {}
    for node in ast.walk(function):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name):
            seen.setdefault(target.id, []).append(node.value)
        elif isinstance(target, ast.Tuple):
            for position, part in enumerate(target.elts):
                if isinstance(part, ast.Name):
                    value = ast.Subscript(node.value, ast.Constant(position), ast.Load())
                    seen.setdefault(part.id, []).append(value)
    return {name: values[0] for name, values in seen.items() if len(values) == 1}


class _Substitute(ast.NodeTransformer):
    def __init__(self, values: dict[str, ast.expr]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return copy.deepcopy(self.values.get(node.id, node))


def expanded(test: ast.expr, values: dict[str, ast.expr]) -> ast.expr:
    """`test` with local names replaced by their values, twice (a name of a name is as deep as the sources go)."""
    once = _Substitute(values).visit(copy.deepcopy(test))
    return ast.fix_missing_locations(_Substitute(values).visit(once))


def guards(body: list[ast.stmt], outer: tuple[str, ...] = ()) -> Iterator[tuple[ast.If, tuple[str, ...]]]:
    """(`if` whose body ends in a raise of its own, conditions around it), in source order; nested functions are not entered."""
    for node in body:
        if isinstance(node, ast.If):
            last = node.body[-1]
            if isinstance(last, ast.Raise) and last.exc is not None:
                yield node, outer
            inside, beside = f"({ast.unparse(node.test)})", f"not ({ast.unparse(node.test)})"
            yield from guards(node.body, (*outer, inside))
            yield from guards(node.orelse, (*outer, beside))
        elif isinstance(node, ast.Try):
            yield from guards(node.body, outer)
            for handler in node.handlers:
                yield from guards(handler.body, (*outer, f"{ast.unparse(handler.type) if handler.type else 'anything'} was raised"))
        elif isinstance(node, ast.For | ast.While | ast.With):
            yield from guards(node.body, outer)


def message_of(node: ast.Raise, value: Callable[[ast.expr], str | None] | None = None) -> str:
    """The text that a raise gives. value: what a formatted expression is shown as, None for one that is not known ("…").

    Without `value` formatted expressions appear as {expression}.
    """
    call = node.exc
    if not isinstance(call, ast.Call) or not call.args:
        return ast.unparse(node.exc) if node.exc is not None else "re-raises"
    return _text(call.args[0], value)


def _text(node: ast.expr, value: Callable[[ast.expr], str | None] | None) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, value) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        if value is None:
            return "{" + ast.unparse(node.value) + "}"
        known = value(node.value)
        return "…" if known is None else known
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left, value) + _text(node.right, value)
    return ast.unparse(node)


def exception_of(node: ast.Raise) -> str:
    """Class name of what is raised."""
    target = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return ast.unparse(target) if target is not None else "re-raise"
