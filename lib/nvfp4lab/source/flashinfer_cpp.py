"""Capability checks in the C++ that FlashInfer ships and compiles, found by regular expression.

NOT AST: a macro, a template or a comment can fool it, so every fact says so in its note. Only sources that a JIT generator
names are read (`FLASHINFER_CSRC_DIR / "file.cu"`), and only checks of a GPU's major, minor or SM number are kept.
"""

import posixpath
import re
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flashinfer_reader import Reader

_NAMED_SOURCE = re.compile(r"[\"']([\w./]+\.(?:cu|cuh|cpp|h))[\"']")
_CHECK = re.compile(
    r"\b(?P<macro>TVM_FFI_ICHECK|TVM_FFI_CHECK|TORCH_CHECK|FLASHINFER_CHECK|TLLM_CHECK_WITH_INFO|TLLM_CHECK)"
    r"(?:_(?P<compare>EQ|NE|GE|GT|LE|LT))?\s*\((?P<body>(?:[^()]|\([^()]*\))*?)\)\s*(?:<<|;)"
)
_NAME = r"(?:\w+(?:\.|->))?(?:\w*_)?(?:major|sm_version|sm)_?"
_NUMBER = r"(?:[7-9]|1[0-3]|[7-9]\d|1[0-3]\d)\b"  # a major, or ten times a major plus a minor
_CAPABILITY = re.compile(rf"(?<!\w){_NAME}\s*(?:==|>=|<=|>|<)\s*{_NUMBER}|^\s*{_NAME}\s*,\s*{_NUMBER}")
_FUNCTION = re.compile(r"^(?:[A-Za-z_][\w:<>,&*\s]*?[\s&*])((?:\w+::)*~?\w+)\s*\([^;{}]*\)[^;{}()]*\{", re.M)
_EXPORT = re.compile(r"\bTVM_FFI_DLL_EXPORT_TYPED_FUNC\(\s*(\w+)\s*,")
_SIGNS = {"EQ": "==", "NE": "!=", "GE": ">=", "GT": ">", "LE": "<=", "LT": "<"}
NOTE = "C++ read by regular expression, not AST"


def facts(reader: Reader) -> Iterator[Fact]:
    """Checks in sources that export an FP4 or MoE function.

    `gate_cpp`: the check stands in the exported function, or in a method of a class that the file's functions share.
    `gate_cpp_maybe`: it stands in a free helper, and whether the operation reaches that is not known.
    """
    for name in _sources(reader):
        text = reader.index.package.tree.read(name).decode("utf-8", errors="replace")
        exported = [found for found in dict.fromkeys(_EXPORT.findall(text)) if "fp4" in found.lower()]
        for check in _CHECK.finditer(text) if exported else ():
            condition = _condition(check)
            if condition is not None:
                yield from _check_facts(reader, name, text, check, condition, exported)


def _check_facts(reader: Reader, name: str, text: str, check: re.Match, condition: str, exported: list[str]) -> Iterator[Fact]:
    line = text.count("\n", 0, check.start()) + 1
    scope = _enclosing(text, check.start())
    shared = "::" in scope
    for operation in [scope] if scope in exported else exported:
        predicate = "gate_cpp" if shared or operation == scope else "gate_cpp_maybe"
        where = f"in {scope}, " + (
            "shared by the file's functions" if shared else "its own body" if operation == scope else "a helper"
        )
        yield Fact(
            "flashinfer",
            reader.version,
            operation,
            predicate,
            condition,
            name,
            line,
            evidence=text.splitlines()[line - 1].strip(),
            scope=scope,
            note=f"{NOTE}; {where}",
        )


def _enclosing(text: str, position: int) -> str:
    """Name of the nearest function definition that starts at column 0 before `position`; "?" when there is none."""
    last = None
    for found in _FUNCTION.finditer(text, 0, position):
        last = found
    return last[1] if last else "?"


def _condition(check: re.Match) -> str | None:
    """`major == 10 || major == 12`, or None where the check is about something else."""
    body = " ".join(check["body"].split())
    if _CAPABILITY.search(body) is None:
        return None
    if check["compare"]:
        left, _, right = body.rpartition(",")
        return f"{left.strip()} {_SIGNS[check['compare']]} {right.strip()}"
    return body.split(', "')[0]


def _sources(reader: Reader) -> list[str]:
    """C++ members that the JIT generators name: a member counts when it ends with a path that one of them writes."""
    named = set()
    for module in reader.modules:
        text = "\n".join(module.lines)
        if "supported_major_versions" in text:
            named.update(_NAMED_SOURCE.findall(text))
    by_file = {posixpath.basename(suffix): suffix for suffix in named}
    members = reader.index.package.tree.names()
    return [name for name in members if name.endswith("/" + by_file.get(posixpath.basename(name), "\0"))]
