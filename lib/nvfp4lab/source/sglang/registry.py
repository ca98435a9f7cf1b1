"""Fused functions: which (a2a, runner) pairs are registered, where, and by which import the registration happens."""

import ast
import dataclasses
import re
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.module import Definition
from nvfp4lab.source.sglang.reading import Reading, Spot, per_reading

_DECORATOR = "register_fused_func"


@dataclasses.dataclass(frozen=True, eq=False)
class FusedFunction:
    """One registered key. line: of the decorator (a function may carry several)."""

    a2a: str
    runner: str
    definition: Definition
    line: int

    @property
    def spot(self) -> Spot:
        return self.definition.file, self.line


@per_reading
def fused_functions(reading: Reading) -> tuple[FusedFunction, ...]:
    """Every key of the package, stacked decorators included."""
    found = []
    for module in reading.index.modules(b"@" + _DECORATOR.encode()):
        for definition in module.functions():
            for mark in definition.node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func).rsplit(".", 1)[-1] == _DECORATOR:
                    words = [argument.value for argument in mark.args if isinstance(argument, ast.Constant)]
                    if len(words) == 2:
                        found.append(FusedFunction(words[0], words[1], definition, mark.lineno))
    return tuple(found)


def lookup(reading: Reading, a2a: str, runner: str) -> FusedFunction | None:
    return next((key for key in fused_functions(reading) if (key.a2a, key.runner) == (a2a, runner)), None)


def read(reading: Reading) -> Iterator[Fact]:
    keys = fused_functions(reading)
    if not keys:
        yield reading.not_found(
            "moe_runner", "registered_fused_func", f"functions decorated with @{_DECORATOR}(a2a, runner)", "all modules"
        )
    for key in keys:
        importers = importers_of(reading, key.definition.module.dotted)
        lazy = ", ".join(f"{member}:{line}" for member, line in importers[:4])
        note = f"registered when its module is imported: {lazy}" if importers else "no module of the package imports its module"
        for subject in (f"moe_runner:registered:{key.runner}", f"moe:{key.runner}"):
            yield reading.fact(
                subject,
                "registered_fused_func",
                [key.a2a, key.runner],
                key.spot,
                also=importers,
                scope=key.definition.scope,
                note=note,
            )


@per_reading
def importers_of(reading: Reading, dotted: str) -> tuple[Spot, ...]:
    """Lines outside the module that import it, at module level or inside a function."""
    package, _, name = dotted.rpartition(".")
    words = [rf"import {re.escape(dotted)}\b", rf"from {re.escape(dotted)} import\b"]
    pattern = re.compile("|".join([*words, rf"from {re.escape(package)} import [^\n]*\b{name}\b"]))
    listed = re.compile(rf"from {re.escape(package)} import \([^)]*?\b{name}\b,?[^)]*\)", re.S)
    found: list[Spot] = []
    own = dotted.replace(".", "/")
    for member in reading.index.mentioning(package.encode(), name.encode()):
        if member.startswith(own):
            continue
        text = reading.index.text(member)
        starts = [match.start() for match in pattern.finditer(text)]
        starts += [match.start() + match[0].index(name) for match in listed.finditer(text)]
        found += [(member, text.count("\n", 0, start) + 1) for start in starts]
    return tuple(found)
