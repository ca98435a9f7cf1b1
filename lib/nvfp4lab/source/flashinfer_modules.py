"""The parsed modules of one FlashInfer, and names followed across them.

Only files whose bytes hold one of the constructs that carry a fact are parsed (a whole tree of 0.7 is 126 MB of Python);
a module reached through an import is parsed when somebody asks for it.
"""

import ast
import dataclasses
import functools
import posixpath
import re
from collections.abc import Iterator

from nvfp4lab.source.package import Package

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef

# What a file must hold to be parsed: an FP4 or MoE word, and one construct that states a capability.
_TOPIC = re.compile(rb"fp4|FP4|[mM]o[eE]")
_CONSTRUCT = re.compile(
    rb"supported_compute_capability|backend_requirement|supported_major_versions"
    rb"|def get_\w+_module\(|flashinfer_api[\s\S]*get_compute_capability"
)
_ENTRY_TEST = re.compile(rb"\bdef supported_compute_capability\(|\bdef backend_requirement\(")


@dataclasses.dataclass(frozen=True)
class Module:
    """One parsed file. `functions` holds top-level functions and methods by qualified name, `constants` top-level values."""

    file: str
    tree: ast.Module
    functions: dict[str, FunctionNode]
    classes: dict[str, ast.ClassDef]
    constants: dict[str, ast.expr]
    imports: dict[str, tuple[str, str]]


def _qualified_functions(tree: ast.Module) -> dict[str, FunctionNode]:
    found: dict[str, FunctionNode] = {}
    for node in _top_level(tree.body):
        if isinstance(node, FunctionNode):
            found.setdefault(node.name, node)
        elif isinstance(node, ast.ClassDef):
            found.update({f"{node.name}.{inner.name}": inner for inner in node.body if isinstance(inner, FunctionNode)})
    return found


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those under `if` and `try` included: an optional import is still a definition."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from _top_level(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from _top_level(node.body + [stmt for handler in node.handlers for stmt in handler.body] + node.orelse)


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    found = {}
    for node in _top_level(tree.body):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            found[node.target.id] = node.value
    return found


def _imports(tree: ast.Module, file: str) -> dict[str, tuple[str, str]]:
    """Imported name -> (dotted module, name there); relative imports are made absolute from `file`."""
    package = posixpath.dirname(file).split("/")
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                found[alias.asname or alias.name] = (module, alias.name)
    return found


class Modules:
    """Modules of one FlashInfer package, parsed on demand; nothing of it is imported."""

    def __init__(self, package: Package):
        self.package = package
        self.unparsed: dict[str, str] = {}
        self._names = frozenset(package.tree.names())
        self._modules: dict[str, Module | None] = {}

    @functools.cached_property
    def candidates(self) -> tuple[str, ...]:
        """Python files that may state a capability about FP4 or MoE, by their bytes."""
        found = []
        for name in sorted(self._names):
            if name.endswith(".py"):
                text = self.package.tree.read(name)
                if _ENTRY_TEST.search(text) or (_TOPIC.search(text) and _CONSTRUCT.search(text)):
                    found.append(name)
        return tuple(found)

    def __iter__(self) -> Iterator[Module]:
        """Every candidate that parses; the others are named in `unparsed`."""
        for name in self.candidates:
            module = self.module(name)
            if module is not None:
                yield module

    def module(self, name: str) -> Module | None:
        """The parsed file, or None where it is absent or does not parse."""
        if name not in self._modules:
            self._modules[name] = self._parse(name) if name in self._names else None
        return self._modules[name]

    def _parse(self, name: str) -> Module | None:
        try:
            tree = ast.parse(self.package.tree.read(name))
        except (SyntaxError, ValueError) as error:
            self.unparsed[name] = str(error)
            return None
        classes = {node.name: node for node in _top_level(tree.body) if isinstance(node, ast.ClassDef)}
        return Module(name, tree, _qualified_functions(tree), classes, _constants(tree), _imports(tree, name))

    def function(self, module: Module, name: str) -> tuple[Module, FunctionNode] | None:
        """The definition that `name` means in `module`, following imports through at most four files."""
        for _ in range(4):
            if name in module.functions:
                return module, module.functions[name]
            origin = self._origin(module, name)
            if origin is None:
                return None
            module, name = origin
        return None

    def constant(self, module: Module, name: str) -> tuple[Module, ast.expr] | None:
        """The value that `name` has at the top of `module`, following imports through at most four files."""
        for _ in range(4):
            if name in module.constants:
                return module, module.constants[name]
            origin = self._origin(module, name)
            if origin is None:
                return None
            module, name = origin
        return None

    def _origin(self, module: Module, name: str) -> tuple[Module, str] | None:
        if name not in module.imports:
            return None
        dotted, original = module.imports[name]
        path = dotted.replace(".", "/")
        target = self.module(f"{path}.py") or self.module(f"{path}/__init__.py")
        return (target, original) if target is not None else None


def literal(modules: Modules, module: Module, node: ast.expr | None) -> object | None:
    """The value of `node` if it is provably constant: a literal, or a name bound to one; otherwise None."""
    if isinstance(node, ast.Name):
        found = modules.constant(module, node.id)
        return literal(modules, *found) if found else None
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id in {"tuple", "list", "set", "frozenset", "sorted"}
    ):
        return literal(modules, module, node.args[0]) if node.args else None
    if isinstance(node, ast.List | ast.Tuple | ast.Set):
        return _elements(modules, module, node.elts)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.BitOr):
        left, right = literal(modules, module, node.left), literal(modules, module, node.right)
        return left + right if isinstance(left, list) and isinstance(right, list) else None
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None


def _elements(modules: Modules, module: Module, elements: list[ast.expr]) -> list | None:
    values: list = []
    for element in elements:
        starred = isinstance(element, ast.Starred)
        value = literal(modules, module, element.value if starred else element)
        if value is None:
            return None
        values.extend(value) if starred else values.append(value)
    return values
