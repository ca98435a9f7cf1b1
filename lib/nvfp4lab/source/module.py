"""One parsed member: its definitions, constants, and what each name is imported from, scope by scope."""

import ast
import dataclasses
import functools
from collections.abc import Iterator

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclasses.dataclass(frozen=True, order=True)
class Import:
    """One target of an imported name.

    dotted: what the name denotes. line: of the import statement's alias. guarded: the import stands under `if` or `try`,
    so other targets of the same name may be the real one.
    """

    dotted: str
    line: int
    guarded: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Definition:
    """A class or function with the module that holds it. scope: its qualified name inside the module."""

    module: "Module"
    node: ast.ClassDef | FunctionNode
    scope: str

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def file(self) -> str:
        return self.module.member

    @property
    def line(self) -> int:
        return self.node.lineno

    @property
    def dotted(self) -> str:
        return f"{self.module.dotted}.{self.scope}"

    @functools.cached_property
    def methods(self) -> dict[str, "Definition"]:
        """Methods written in this class body, last definition of a name wins."""
        return {
            node.name: Definition(self.module, node, f"{self.scope}.{node.name}")
            for node in statements(self.node.body)
            if isinstance(node, FunctionNode)
        }

    @functools.cached_property
    def imports(self) -> dict[str, frozenset[Import]]:
        """Names visible inside this function: its own imports over those of the module."""
        return {**self.module.imports, **_imports_in(self.node, self.module.dotted, self.module.is_package)}


class Module:
    """One parsed member. Names of other scopes never leak: function-local imports are seen through `Definition.imports`."""

    def __init__(self, member: str, tree: ast.Module, lines: list[str]):
        self.member = member
        self.tree = tree
        self.lines = lines
        self.is_package = member.endswith("/__init__.py")
        self.dotted = member.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")

    @functools.cached_property
    def imports(self) -> dict[str, frozenset[Import]]:
        """Module-level imports by local name, `if`/`try` branches included. A name may have several targets."""
        return _imports_in(self.tree, self.dotted, self.is_package)

    @functools.cached_property
    def definitions(self) -> dict[str, Definition]:
        """Module-level classes and functions, also those under `if` and `try`; the first definition of a name."""
        found: dict[str, Definition] = {}
        for node in statements(self.tree.body):
            if isinstance(node, ast.ClassDef | FunctionNode):
                found.setdefault(node.name, Definition(self, node, node.name))
        return found

    @functools.cached_property
    def constants(self) -> dict[str, list[ast.Assign | ast.AnnAssign]]:
        """Module-level assignments by name, in order; chained targets (`a = b = ...`) count for each name."""
        found: dict[str, list] = {}
        for node in statements(self.tree.body):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            for target in targets:
                if isinstance(target, ast.Name) and node.value is not None:
                    found.setdefault(target.id, []).append(node)
        return found

    @functools.cached_property
    def ordinary(self) -> dict[str, ast.Assign | ast.AnnAssign]:
        """The last module-level assignment of each name in the ordinary case: imports succeed, so `except` handlers and
        `else` branches are left out."""
        found: dict[str, ast.Assign | ast.AnnAssign] = {}
        for node in _ordinary(self.tree.body):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            found |= {target.id: node for target in targets if isinstance(target, ast.Name) and node.value is not None}
        return found

    @functools.cached_property
    def all_functions(self) -> tuple[Definition, ...]:
        """Every function of the module, methods and nested ones included, with its scope."""
        return tuple(_functions_below(self, self.tree.body, ""))

    def functions(self) -> Iterator[Definition]:
        return iter(self.all_functions)

    def line_text(self, line: int) -> str:
        return self.lines[line - 1].strip() if 0 < line <= len(self.lines) else ""


def _functions_below(module: Module, body: list[ast.stmt], scope: str) -> Iterator[Definition]:
    for node in statements(body):
        if isinstance(node, ast.ClassDef | FunctionNode):
            inner = f"{scope}.{node.name}" if scope else node.name
            if isinstance(node, FunctionNode):
                yield Definition(module, node, inner)
            yield from _functions_below(module, node.body, inner)


def _ordinary(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _ordinary(node.body)


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of one scope in order, those inside `if`, `try`, `with`, `for` included; definitions are not entered."""
    for node in body:
        yield node
        if isinstance(node, ast.ClassDef | FunctionNode):
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from statements(handler.body)


def _imports_in(scope: ast.AST, dotted: str, is_package: bool) -> dict[str, frozenset[Import]]:
    found: dict[str, set[Import]] = {}
    top = {id(node) for node in scope.body}
    for node in statements(scope.body):
        guarded = id(node) not in top
        if isinstance(node, ast.Import):
            for alias in node.names:
                target = alias.name if alias.asname else alias.name.split(".")[0]
                found.setdefault(alias.asname or target, set()).add(Import(target, alias.lineno, guarded))
        elif isinstance(node, ast.ImportFrom):
            base = absolute(node, dotted, is_package)
            for alias in node.names:
                target = f"{base}.{alias.name}" if base else alias.name
                found.setdefault(alias.asname or alias.name, set()).add(Import(target, alias.lineno, guarded))
    return {name: frozenset(targets) for name, targets in found.items()}


def absolute(node: ast.ImportFrom, dotted: str, is_package: bool) -> str:
    """Dotted module that `from X import ...` names, relative dots resolved against the importing module."""
    if not node.level:
        return node.module or ""
    parts = dotted.split(".")
    keep = len(parts) - node.level + (1 if is_package else 0)
    return ".".join([*parts[: max(keep, 0)], *([node.module] if node.module else [])])
