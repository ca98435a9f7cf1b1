"""Environment variables that the NVFP4 path reads: where, and what they are when nobody sets them."""

import ast
import re
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.module import Module
from nvfp4lab.source.sglang import registry
from nvfp4lab.source.sglang.methods import methods_by_name
from nvfp4lab.source.sglang.reading import Reading, Spot

# `envs.NAME.get()`, and the older ways to read the process environment
_READ = re.compile(
    r"""envs\.([A-Z][A-Z0-9_]+)\.|(?:getenv|environ\.get|get_bool_env_var|get_int_env_var)\(\s*["']([A-Z][A-Z0-9_]+)["']"""
)


def read(reading: Reading) -> Iterator[Fact]:
    """`env:NAME read_at` (each module on the path once) and `env:NAME default`."""
    read_at: dict[str, list[Spot]] = {}
    for module in _path_modules(reading):
        for number, line in enumerate(module.lines, 1):
            for match in _READ.finditer(line):
                read_at.setdefault(match[1] or match[2], []).append((module.member, number))
    declared = _declarations(reading, set(read_at))
    for name, spots in sorted(read_at.items()):
        modules = sorted({member for member, _ in spots})
        yield reading.fact(f"env:{name}", "read_at", modules, spots[0], also=spots[1:])
        if name in declared:
            value, spot = declared[name]
            yield reading.fact(f"env:{name}", "default", value, spot)


def _path_modules(reading: Reading) -> list[Module]:
    """Modules that define the enums, the NVFP4 methods, the runner and its fused functions, and the dispatchers."""
    found: dict[str, Module] = {}
    for enum in reading.vocabulary.enums.values():
        found[enum.definition.file] = enum.definition.module
    for method in methods_by_name(reading).values():
        for owner in (method.config, method.linear, method.moe):
            found |= {owner.file: owner.module} if owner else {}
    for runner in reading.index.classes("MoeRunner"):
        found[runner.file] = runner.module
    for key in registry.fused_functions(reading):
        found[key.definition.file] = key.definition.module
    for name in ("StandardDispatcher", "FlashinferDispatcher", "DeepEPDispatcher", "FusedMoE"):
        found |= {definition.file: definition.module for definition in reading.index.classes(name)}
    return list(found.values())


def _declarations(reading: Reading, names: set[str]) -> dict[str, tuple[object, Spot]]:
    """Defaults where variables are declared: `NAME = EnvBool(False)` in a class body."""
    found: dict[str, tuple[object, Spot]] = {}
    for member in reading.index.search(rb"^\s+SGLANG_\w+\s*(?::[^=\n]+)?=\s*Env\w+\(", b"= Env"):
        module = reading.index.module(member)
        for node in ast.walk(module.tree) if module else ():
            targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
            name = targets[0].id if targets and isinstance(targets[0], ast.Name) else ""
            call = getattr(node, "value", None)
            if name in names and isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant):
                found.setdefault(name, (call.args[0].value, (member, node.lineno)))
    return found
