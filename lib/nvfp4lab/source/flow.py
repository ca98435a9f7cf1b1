"""Ordered reading of one function for one scenario: what it calls, raises, asserts, imports, sets and returns.

Where a condition is decided the dead branch is not read. Where it is not, both branches are, and every event carries the
undecided conditions it depends on. One pass, no path explosion: after an undecided branch, names whose values differ
become unknown, and a branch that surely leaves puts its negation on what follows.
"""

import ast
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

from nvfp4lab.source.evaluate import Evaluator, Frame
from nvfp4lab.source.flashinfer_conditions import message_of
from nvfp4lab.source.module import Definition, FunctionNode
from nvfp4lab.source.values import UNKNOWN, Instance, Reference, Self, Unknown, shown

Kind = Literal["call", "raise", "assert", "import", "set", "return"]


@dataclasses.dataclass(frozen=True)
class Guard:
    """An undecided condition: `test` held (or not). line: where it stands.

    undecided: the parts of `test` that were not decided; the other conjuncts are true in this scenario.
    """

    test: ast.expr
    holds: bool
    line: int
    undecided: tuple[ast.expr, ...] = ()

    @property
    def text(self) -> str:
        words = " ".join(ast.unparse(self.test).split())
        return words if self.holds else f"not ({words})"


@dataclasses.dataclass(frozen=True)
class Event:
    """One thing that a function does.

    dotted: callee, imported module, exception type, or the attribute or key set ("self.x", '["x"]').
    value: of an assignment or return; of a call to a class, the instance; of a raise, its text. arguments: values of a call's
    positional and keyword arguments. guards: the undecided conditions on the way; decided: line numbers of the decided ones.
    """

    kind: Kind
    node: ast.AST
    line: int
    dotted: str
    definition: Definition
    guards: tuple[Guard, ...] = ()
    decided: tuple[int, ...] = ()
    value: Any = UNKNOWN
    arguments: tuple[tuple[str | int, Any], ...] = ()

    def argument(self, position: int, name: str) -> Any:
        """Value of one argument of a call, given by position or by name; UNKNOWN when it is not passed."""
        return next((value for key, value in self.arguments if key in (position, name)), UNKNOWN)


@dataclasses.dataclass
class _State:
    frame: Frame
    guards: tuple[Guard, ...]
    decided: tuple[int, ...]


class Flow:
    """Reads one function. `events` in order of execution; `leaves`: every way out was a return or raise."""

    def __init__(self, evaluator: Evaluator, definition: Definition, env: dict[str, Any] | None = None):
        self.definition = definition
        self.events: list[Event] = []
        self._evaluator = evaluator
        names = [
            argument.arg
            for argument in (*definition.node.args.posonlyargs, *definition.node.args.args, *definition.node.args.kwonlyargs)
        ]
        frame = Frame(definition, definition.module, dict.fromkeys(names, UNKNOWN) | _defaults(definition, evaluator) | (env or {}))
        self._state = _State(frame, (), ())
        self.leaves = self._block(definition.node.body, self._state)
        self.env = self._state.frame.env

    def of_kind(self, *kinds: Kind) -> Iterator[Event]:
        return (event for event in self.events if event.kind in kinds)

    def _emit(self, kind: Kind, node: ast.AST, dotted: str, state: _State, value: Any = UNKNOWN) -> None:
        self.events.append(Event(kind, node, node.lineno, dotted, self.definition, state.guards, state.decided, value))

    def _block(self, body: list[ast.stmt], state: _State) -> bool:
        """Read statements in order; True when the block surely leaves the function."""
        return any(self._statement(node, state) for node in body)

    def _statement(self, node: ast.stmt, state: _State) -> bool:
        if isinstance(node, ast.If):
            return self._if(node, state)
        if isinstance(node, ast.Try):
            return self._block([*node.body, *node.orelse, *node.finalbody], state)
        if isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._expression(item.context_expr, state)
            return self._block(node.body, state)
        if isinstance(node, ast.For | ast.AsyncFor | ast.While):
            return self._loop(node, state)
        if isinstance(node, FunctionNode | ast.ClassDef):
            state.frame.env[node.name] = Reference(f"{self.definition.dotted}.{node.name}")
            return False
        return self._simple(node, state)

    def _simple(self, node: ast.stmt, state: _State) -> bool:
        if isinstance(node, ast.Return):
            if node.value is not None:
                self._expression(node.value, state)
            value = self._evaluator.value(node.value, state.frame) if node.value else None
            self._emit("return", node, "", state, value)
            return True
        if isinstance(node, ast.Raise):
            said = message_of(node, lambda part: shown(self._evaluator.value(part, state.frame)))
            self._emit("raise", node, _exception_name(node), state, said)
            return True
        if isinstance(node, ast.Assert):
            self._assert(node, state)
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            self._assign(node, state)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node, state)
        elif isinstance(node, ast.Expr):
            self._expression(node.value, state)
        return isinstance(node, ast.Continue | ast.Break)

    def _assert(self, node: ast.Assert, state: _State) -> None:
        decided = self._evaluator.truth(node.test, state.frame)
        if decided is not True:
            self._emit("assert", node, "AssertionError", state, UNKNOWN if decided is None else False)

    def _import(self, node: ast.Import | ast.ImportFrom, state: _State) -> None:
        for alias in node.names:
            targets = self.definition.imports.get(alias.asname or alias.name.split(".")[0], ())
            match = next((target.dotted for target in targets if target.line == alias.lineno), alias.name)
            name = alias.name if isinstance(node, ast.Import) else match
            self.events.append(Event("import", node, alias.lineno, name, self.definition, state.guards, state.decided))

    def _if(self, node: ast.If, state: _State) -> bool:
        self._expression(node.test, state)
        decided = self._evaluator.truth(node.test, state.frame)
        if decided is not None:
            state.decided = (*state.decided, node.test.lineno)
            return self._block(node.body if decided else node.orelse, state)
        parts = self._undecided(node.test, state.frame)
        yes, no = (Guard(node.test, holds, node.test.lineno, parts) for holds in (True, False))
        left = _State(state.frame.fork(), (*state.guards, yes), state.decided)
        right = _State(state.frame.fork(), (*state.guards, no), state.decided)
        left_leaves, right_leaves = self._block(node.body, left), self._block(node.orelse, right)
        if left_leaves and right_leaves:
            return True
        if left_leaves or right_leaves:
            stays = right if left_leaves else left
            state.frame.env, state.guards = stays.frame.env, stays.guards
        else:
            state.frame.env = _merge(left.frame.env, right.frame.env)
        return False

    def _undecided(self, test: ast.expr, frame: Frame) -> tuple[ast.expr, ...]:
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]
        return tuple(part for part in parts if self._evaluator.truth(part, frame) is None)

    def _loop(self, node: ast.For | ast.AsyncFor | ast.While, state: _State) -> bool:
        self._expression(node.iter if isinstance(node, ast.For | ast.AsyncFor) else node.test, state)
        inner = _State(state.frame.fork(), state.guards, state.decided)
        for name in _assigned_names(node):
            inner.frame.env[name] = UNKNOWN
        self._block(node.body, inner)
        state.frame.env = _merge(state.frame.env, inner.frame.env)
        return self._block(node.orelse, state)

    def _assign(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, state: _State) -> None:
        if node.value is None:
            return
        self._expression(node.value, state)
        value = UNKNOWN if isinstance(node, ast.AugAssign) else self._evaluator.value(node.value, state.frame)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            self._bind(target, node, value, state)

    def _bind(self, target: ast.expr, node: ast.stmt, value: Any, state: _State) -> None:
        if isinstance(target, ast.Name):
            state.frame.env[target.id] = value
            self._emit("set", node, target.id, state, value)
        elif isinstance(target, ast.Tuple | ast.List):
            parts = value if isinstance(value, tuple) and len(value) == len(target.elts) else [UNKNOWN] * len(target.elts)
            for inner, part in zip(target.elts, parts, strict=True):
                self._bind(inner, node, part, state)
        elif isinstance(target, ast.Attribute):
            owner = self._evaluator.value(target.value, state.frame)
            if isinstance(owner, Self):
                owner.attributes[target.attr] = (
                    value if not state.guards else _agree(owner.attributes.get(target.attr, value), value)
                )
            self._emit("set", node, ast.unparse(target), state, value)
        elif isinstance(target, ast.Subscript):
            self._emit("set", node, f"[{ast.unparse(target.slice)}]", state, value)

    def _expression(self, node: ast.expr, state: _State) -> None:
        """Emit the calls inside an expression, inner ones first; lambdas and comprehensions included."""
        for call in self._evaluator.index.calls_in(node):
            dotted = self.callee(call.func, state.frame)
            is_class = dotted.rsplit(".", 1)[-1].lstrip("_")[:1].isupper()
            value = self._evaluator.value(call, state.frame) if is_class else UNKNOWN
            made = value if isinstance(value, Instance) else UNKNOWN
            passed = self._arguments(call, state.frame)
            self.events.append(Event("call", call, call.lineno, dotted, self.definition, state.guards, state.decided, made, passed))

    def _arguments(self, call: ast.Call, frame: Frame) -> tuple[tuple[str | int, Any], ...]:
        """Argument values that a callee may branch on: constants, names and enum members; nothing is evaluated twice."""
        pairs = [*enumerate(call.args), *((word.arg, word.value) for word in call.keywords if word.arg)]
        simple = [(key, node) for key, node in pairs if isinstance(node, ast.Constant | ast.Name | ast.Attribute)]
        return tuple((key, self._evaluator.value(node, frame)) for key, node in simple)

    def callee(self, func: ast.expr, frame: Frame) -> str:
        """Dotted name of what is called; names that are not resolved stay as they are written."""
        if isinstance(func, ast.Attribute):
            base = self._evaluator.value(func.value, frame)
            prefix = base.dotted if isinstance(base, Reference) else ast.unparse(func.value)
            return f"{prefix}.{func.attr}"
        value = self._evaluator.value(func, frame)
        return value.dotted if isinstance(value, Reference) else ast.unparse(func)


def _defaults(definition: Definition, evaluator: Evaluator) -> dict[str, Any]:
    """Parameters whose defaults are False, None or numbers keep them: a caller that passes nothing gets those."""
    arguments = definition.node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    pairs = list(zip(positional[len(positional) - len(arguments.defaults) :], arguments.defaults, strict=True))
    pairs += [(name, default) for name, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default]
    return {name.arg: default.value for name, default in pairs if isinstance(default, ast.Constant)}


def _exception_name(node: ast.Raise) -> str:
    target = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    return ast.unparse(target) if target is not None else "re-raise"


def _assigned_names(loop: ast.AST) -> Iterator[str]:
    return (node.id for node in ast.walk(loop) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))


def _agree(left: Any, right: Any) -> Any:
    if isinstance(left, Unknown) or isinstance(right, Unknown):
        return UNKNOWN
    return left if type(left) is type(right) and left == right else UNKNOWN


def _merge(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    return {name: _agree(left.get(name, UNKNOWN), right.get(name, UNKNOWN)) for name in {*left, *right}}
