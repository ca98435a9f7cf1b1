"""The members of one FlashInfer that may state an FP4 or MoE capability, names followed across them, and facts in one voice.

A member counts when its bytes hold an FP4 or MoE word and one construct that carries a capability; nothing depends on where
a file lies. Whatever an import reaches besides is parsed when somebody asks for it.
"""

import ast
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.index import Index
from nvfp4lab.source.module import Definition, Module

_TOPIC = (b"fp4", b"FP4", b"moe", b"MoE")
_CONSTRUCTS = (
    (b"@supported_compute_capability",),
    (b"@backend_requirement",),
    (b"supported_major_versions",),
    (b"@flashinfer_api", b"get_compute_capability"),
    (b"@flashinfer_api", b"backend: "),
)
_WRAPPERS = {"tuple", "list", "set", "frozenset", "sorted"}


class Reader:
    """Reads one FlashInfer through `index`."""

    def __init__(self, index: Index):
        self.index = index
        self.version = index.package.version

    @functools.cached_property
    def modules(self) -> tuple[Module, ...]:
        """Parsed members that may carry a fact, in order of name."""
        stating = {name for words in _CONSTRUCTS for name in self.index.mentioning(*words)}
        on_topic = {name for word in _TOPIC for name in self.index.mentioning(word)}
        return tuple(module for name in sorted(stating & on_topic) if (module := self.index.module(name)))

    def operations(self) -> Iterator[Definition]:
        """Every function and method of these modules that is not nested in another function."""
        for module in self.modules:
            for definition in module.definitions.values():
                if isinstance(definition.node, ast.ClassDef):
                    yield from definition.methods.values()
                else:
                    yield definition

    def function(self, module: Module, name: str) -> Definition | None:
        """The top-level function that `name` means in `module`, imports followed."""
        if name in module.definitions:
            return module.definitions[name]
        targets = sorted(module.imports.get(name, ()))
        return next((found for target in targets if (found := self.index.resolve(target.dotted))), None)

    def constant(self, module: Module, name: str, hops: int = 4) -> tuple[Module, ast.expr] | None:
        """Where `name`, as seen from `module`, is assigned at module level, and to what; None unless assigned exactly once."""
        if name in module.constants:
            rows = module.constants[name]
            return (module, rows[0].value) if len(rows) == 1 and rows[0].value is not None else None
        for target in sorted(module.imports.get(name, ())):
            home, _, original = target.dotted.rpartition(".")
            other = self.index.by_dotted(home) if home and hops else None
            if other is not None and (found := self.constant(other, original, hops - 1)):
                return found
        return None

    def literal(self, module: Module, node: ast.expr | None) -> Any:
        """The value of `node` where it is provably constant (a literal, or a name bound to one once); otherwise None."""
        if isinstance(node, ast.Name):
            found = self.constant(module, node.id)
            return self.literal(*found) if found else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _WRAPPERS and len(node.args) == 1:
            return self.literal(module, node.args[0])
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return self._elements(module, node.elts)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.BitOr):
            left, right = self.literal(module, node.left), self.literal(module, node.right)
            return left + right if isinstance(left, list) and isinstance(right, list) else None
        return node.value if isinstance(node, ast.Constant) else None

    def _elements(self, module: Module, elements: list[ast.expr]) -> list | None:
        values: list = []
        for element in elements:
            starred = isinstance(element, ast.Starred)
            value = self.literal(module, element.value if starred else element)
            if value is None:
                return None
            values.extend(value) if starred else values.append(value)
        return values

    def fact(
        self,
        subject: str,
        predicate: str,
        value: Any,
        at: tuple[Module, int],
        *,
        when: Mapping[str, Any] | None = None,
        also: Iterable[tuple[Module, int]] = (),
        scope: str = "",
        note: str = "",
        derived: bool = False,
    ) -> Fact:
        """One fact of this FlashInfer at a line of a module; `also` are the other lines of its chain."""
        place = self.index.place(at[0].member, at[1])
        others = tuple(self.index.place(module.member, line) for module, line in also)
        return Fact(
            "flashinfer",
            self.version,
            subject,
            predicate,
            value,
            place.file,
            place.line,
            when=dict(when or {}),
            evidence=place.evidence,
            also=others,
            scope=scope,
            note=note,
            derived=derived,
        )
