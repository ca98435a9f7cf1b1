"""The registry of fused MoE functions: which (a2a, runner) pairs have one, and whether its module is imported on a route."""

import ast
import dataclasses
import re

from nvfp4lab.source.module import Definition
from nvfp4lab.source.sglang.reading import Reading

_REGISTER = "register_fused_func"


@dataclasses.dataclass(frozen=True)
class Registered:
    """One registration. importers: modules whose top level imports the registering module; guard: `if` around it."""

    a2a: str
    runner: str
    function: Definition
    line: int
    importers: tuple[str, ...]

    def reached_by(self, imports: list[str]) -> str | None:
        """Why the registration happens on a route that runs these lazy imports; None when the source does not show it."""
        home = self.function.module.dotted
        lazy = next((name for name in imports if name == home or name.startswith(f"{home}.")), None)
        if lazy is not None:
            return f"registered by the import of {home} on this route"
        return f"registered by a top-level import in {self.importers[0]}" if self.importers else None


def registry(reading: Reading) -> dict[tuple[str, str], Registered]:
    """All registrations by (a2a, runner); one function may carry several decorators."""
    found: dict[tuple[str, str], Registered] = {}
    for module in reading.index.modules(_REGISTER.encode()):
        importers = None
        for definition in module.functions():
            for mark in definition.node.decorator_list:
                key = _key(mark)
                if key is None:
                    continue
                importers = _importers(reading, module.dotted) if importers is None else importers
                found.setdefault(key, Registered(*key, definition, mark.lineno, importers))
    return found


def _key(mark: ast.expr) -> tuple[str, str] | None:
    if not (isinstance(mark, ast.Call) and ast.unparse(mark.func).endswith(_REGISTER) and len(mark.args) == 2):
        return None
    values = [argument.value for argument in mark.args if isinstance(argument, ast.Constant)]
    return (values[0], values[1]) if len(values) == 2 else None


def _importers(reading: Reading, dotted: str) -> tuple[str, ...]:
    """Members that import `dotted` at their top level, by the text of their unindented import lines."""
    parent, _, name = dotted.rpartition(".")
    words = {"whole": re.escape(dotted), "parent": re.escape(parent), "name": re.escape(name)}
    pattern = re.compile("^(?:from {whole} import|import {whole}\\b|from {parent} import [^\n]*\\b{name}\\b)".format(**words), re.M)
    own = dotted.replace(".", "/")
    members = [
        member for member in reading.index.mentioning(name.encode(), parent.rpartition(".")[2].encode()) if own not in member
    ]
    return tuple(member for member in members if pattern.search(reading.index.text(member)))[:3]
