"""SGLang on a CPU: what switches it on, what blocks it, and which attention backend it falls back to."""

import ast
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.module import Module, statements
from nvfp4lab.source.sglang import rules
from nvfp4lab.source.sglang.reading import Reading, chain, spot
from nvfp4lab.source.values import Scenario

# Imported before a model is loaded, in this order of the server's start: kernels first, then the memory pool.
_KERNEL_PACKAGE = "sgl_kernel"


def read(reading: Reading) -> Iterator[Fact]:
    yield from _enabled_by(reading)
    yield from _blockers(reading)
    yield from _attention_fallback(reading)


def _enabled_by(reading: Reading) -> Iterator[Fact]:
    """Environment variables that `is_cpu` reads."""
    for definition in reading.index.functions("is_cpu"):
        for node in ast.walk(definition.node):
            if isinstance(node, ast.Return) and node.value is not None:
                for call in (inner for inner in ast.walk(node.value) if isinstance(inner, ast.Call) and inner.args):
                    if isinstance(name := call.args[0], ast.Constant) and isinstance(name.value, str):
                        at = (definition.file, node.lineno)
                        yield reading.fact("cpu", "enabled_by", f"env {name.value}=1", at, scope=definition.scope)


def _blockers(reading: Reading) -> Iterator[Fact]:
    """Imports of the kernel package at module level under `if is_cpu()`: they fail where the package does not load."""
    found = [
        (module, node) for module in reading.index.modules(b"is_cpu", b"from sgl_kernel import") for node in _cpu_imports(module)
    ]
    for module, node in found:
        names = ", ".join(alias.name for alias in node.names)
        text = f"unconditional `from {_KERNEL_PACKAGE} import {names}` when is_cpu()"
        at = (module.member, node.lineno)
        for predicate in ("blocker", "blocker_first"):
            yield reading.fact("cpu", predicate, text, at, also=[(module.member, alias.lineno) for alias in node.names])


def _cpu_imports(module: Module) -> Iterator[ast.ImportFrom]:
    for branch in (node for node in statements(module.tree.body) if isinstance(node, ast.If)):
        words = ast.unparse(branch.test)
        if "is_cpu" not in words or "not " in words:
            continue
        yield from (node for node in branch.body if isinstance(node, ast.ImportFrom) and node.module == _KERNEL_PACKAGE)


def _attention_fallback(reading: Reading) -> Iterator[Fact]:
    """Rules that write `attention_backend` when the CPU lacks AMX."""
    for definition in rules.functions(reading, "attention_backend"):
        if "cpu_has_amx_support" not in ast.unparse(definition.node) and "has_amx" not in ast.unparse(definition.node):
            continue
        for event in reading.flow(definition, Scenario()).events:
            if "amx" not in " ".join(guard.text for guard in event.guards if guard.holds):
                continue
            is_write = event.dotted in ("['attention_backend']",) or event.dotted.endswith(".attention_backend")
            value = (
                event.value.get("attention_backend") if event.kind == "return" and isinstance(event.value, dict) else event.value
            )
            if (is_write or event.kind == "return") and isinstance(value, str):
                when = {"device": "cpu", "amx": False}
                yield reading.fact(
                    "cpu",
                    "attention_backend_fallback",
                    f"{value} when no AMX",
                    spot(event),
                    when=when,
                    also=chain(event),
                    scope=definition.scope,
                )
