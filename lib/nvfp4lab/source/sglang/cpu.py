"""SGLang on a CPU: what switches it on, what blocks it, and which attention backend it falls back to."""

import ast
import re
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.sglang import rules
from nvfp4lab.source.sglang.reading import Reading, chain, spot
from nvfp4lab.source.values import Scenario

_KERNEL_PACKAGE = "sgl_kernel"
# `if is_cpu():` or `if _is_cpu:` at module level with its indented lines
_CPU_BLOCK = r"^if _?is_cpu(?:\(\))?:\n(?:[ \t]+[^\n]*\n|[ \t]*\n|\)\n)+"


def read(reading: Reading) -> Iterator[Fact]:
    yield from _enabled_by(reading)
    yield from _blockers(reading)
    yield from _attention_fallback(reading)


def _enabled_by(reading: Reading) -> Iterator[Fact]:
    """Environment variables that `is_cpu` reads."""
    for definition in reading.index.functions("is_cpu"):
        for call in (node for node in ast.walk(definition.node) if isinstance(node, ast.Call) and node.args):
            name = call.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isupper():
                at = (definition.file, call.lineno)
                yield reading.fact("cpu", "enabled_by", f"env {name.value}=1", at, scope=definition.scope)


def _blockers(reading: Reading) -> Iterator[Fact]:
    """Imports of the kernel package at module level under `if is_cpu()`: they fail where the package does not load.

    Only the `if` block is parsed: the modules are large and nothing else of them is asked.
    """
    for member in reading.index.search(_CPU_BLOCK.encode(), b"from sgl_kernel import"):
        text = reading.index.text(member)
        for block in re.finditer(_CPU_BLOCK, text, re.M):
            first_line = text.count("\n", 0, block.start()) + 1
            for node in _kernel_imports(block[0]):
                names = ", ".join(alias.name for alias in node.names)
                words = f"unconditional `from {_KERNEL_PACKAGE} import {names}` when is_cpu()"
                at = (member, first_line + node.lineno - 1)
                also = [(member, first_line + alias.lineno - 1) for alias in node.names]
                for predicate in ("blocker", "blocker_first"):
                    yield reading.fact("cpu", predicate, words, at, also=also)


def _kernel_imports(block: str) -> Iterator[ast.ImportFrom]:
    """Imports directly under the `if`; those in a `try` may fail softly and do not block."""
    try:
        tree = ast.parse(block)
    except SyntaxError:
        return
    for branch in tree.body:
        body = branch.body if isinstance(branch, ast.If) else []
        yield from (node for node in body if isinstance(node, ast.ImportFrom) and node.module == _KERNEL_PACKAGE)


def _attention_fallback(reading: Reading) -> Iterator[Fact]:
    """Rules that write `attention_backend` when the CPU lacks AMX."""
    for definition in rules.functions(reading, "attention_backend", word=b"amx"):
        if "amx" not in ast.unparse(definition.node):
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
