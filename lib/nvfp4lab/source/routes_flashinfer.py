"""What FlashInfer then says: whether the called operation and backend allow this capability, and who enforces it."""

import ast
import re
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact, Facts
from nvfp4lab.source.routes_query import Gate, Query

# `when` of a FlashInfer fact counts capabilities as 120, and its other conditions are about the installed CUDA and cuDNN.
_CAPABILITY_KEYS = {"cc", "cc_not_in"}


def gates(facts: Facts | None, final_call: str, backend: str | None, query: Query) -> list[Gate]:
    """Gates of one call into FlashInfer; none for another package's kernel. backend: the word passed as `backend=`."""
    if facts is None or not final_call.startswith("flashinfer."):
        return []
    op = final_call.removesuffix(".run").rsplit(".", 1)[-1]
    found = list(_exists(facts, op))
    if not found:
        enforced = any(fact.value is True for fact in facts.query(op, "enforced"))
        found += _capability(facts, op, op, query, enforced)
        found += _jit(facts, op, query)
        found += _cpp(facts, op, query)
        if backend is not None and facts.query(op, "backends"):
            found += _auto(facts, op, query) if backend == "auto" else _backend(facts, op, backend, query)
    return found


def _exists(facts: Facts, op: str) -> Iterator[Gate]:
    for fact in facts.query(op, "exists"):
        if fact.value is False:
            yield Gate(
                f"FlashInfer {fact.version} has no {op}: ImportError, or SGLang's fallback without it",
                "failed",
                fact.file,
                fact.line,
            )


def _capability(facts: Facts, subject: str, op: str, query: Query, enforced: bool) -> Iterator[Gate]:
    for fact in facts.query(subject, "supported_cc"):
        if not isinstance(fact.value, list):
            yield Gate(f"depends on {fact.value}: the capability list of {subject}", "depends", fact.file, fact.line)
            continue
        refuses = enforced or fact.derived
        how = "enforced" if refuses else "only noted, nothing checks it"
        said = f"FlashInfer {fact.version} {subject} is for {fact.value} ({how}), asked is {query.number}"
        yield Gate(said, "met" if query.number in fact.value else "failed", fact.file, fact.line, refuses)


def _backend(facts: Facts, op: str, backend: str, query: Query) -> Iterator[Gate]:
    offered = facts.query(op, "backends")[0]
    if backend not in offered.value:
        said = f"FlashInfer {offered.version} {op} has no backend {backend!r}, it has {offered.value}"
        yield Gate(said, "failed", offered.file, offered.line)
        return
    subject = f"{op}:{backend}"
    yield from _capability(facts, subject, op, query, enforced=True)
    for fact in facts.query(subject, "requires"):
        yield Gate(f"depends on {_without_placeholders(str(fact.value))}", "depends", fact.file, fact.line)


def _without_placeholders(requirement: str) -> str:
    """The error's own text, which ends a requirement in brackets, holds values that only the failing call knows."""
    return re.sub(r"\(\w+: .*\)$", lambda error: re.sub(r"\{[^{}]*\}", "…", error[0]), requirement)


def _auto(facts: Facts, op: str, query: Query) -> Iterator[Gate]:
    """What the heuristic tries here, of what the lists allow."""
    for fact in facts.query(f"{op}:auto", "auto_candidates"):
        if not _capability_holds(fact, query.number):
            continue
        allowed = [name for name in fact.value if _allows(facts, f"{op}:{name}", query.number)]
        others = {name: value for name, value in fact.when.items() if name not in _CAPABILITY_KEYS}
        given = " and ".join(f"{name} {value}" for name, value in others.items())
        said = (
            f"backend='auto' tries {allowed}" + (f", depends on {given}" if given else "") + (f"; {fact.note}" if fact.note else "")
        )
        yield Gate(said, "depends" if allowed else "failed", fact.file, fact.line)


def _capability_holds(fact: Fact, number: int) -> bool:
    when = fact.when
    return number in when.get("cc", [number]) and number not in when.get("cc_not_in", [])


def _allows(facts: Facts, subject: str, number: int) -> bool:
    listed = [fact.value for fact in facts.query(subject, "supported_cc") if isinstance(fact.value, list)]
    return all(number in value for value in listed)


def _jit(facts: Facts, op: str, query: Query) -> Iterator[Gate]:
    for fact in facts.query(op, "built_for_majors"):
        if not _capability_holds(fact, query.number):
            continue
        state = "met" if query.capability[0] in fact.value else "failed"
        yield Gate(f"{fact.note} compiles for majors {fact.value} only", state, fact.file, fact.line)


def _cpp(facts: Facts, op: str, query: Query) -> Iterator[Gate]:
    major, minor = query.capability
    for fact in [*facts.query(op, "gate_cpp"), *facts.query(op, "gate_cpp_maybe")]:
        answer = _cpp_holds(str(fact.value), major, minor)
        sure = fact.predicate == "gate_cpp" and answer is not None
        state = ("met" if answer else "failed") if sure else "depends"
        prefix = "" if sure else "depends on "
        yield Gate(f"{prefix}{fact.value} ({fact.note})", state, fact.file, fact.line)


def _cpp_holds(condition: str, major: int, minor: int) -> bool | None:
    """A C++ condition over the capability only; None for any other."""
    text = condition.replace("||", " or ").replace("&&", " and ")
    text = re.sub(r"\b\w+(?:\.|->)(major|minor)\b", r"\1", text)
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return None
    return _boolean(tree.body, {"major": major, "minor": minor, "sm_version": 10 * major + minor})


def _boolean(node: ast.expr, names: dict[str, int]) -> bool | None:
    if isinstance(node, ast.BoolOp):
        parts = [_boolean(value, names) for value in node.values]
        if None in parts:
            return None
        return all(parts) if isinstance(node.op, ast.And) else any(parts)
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        left, right = _number(node.left, names), _number(node.comparators[0], names)
        if left is None or right is None:
            return None
        answers = {ast.Eq: left == right, ast.NotEq: left != right, ast.GtE: left >= right, ast.Gt: left > right}
        answers |= {ast.LtE: left <= right, ast.Lt: left < right}
        return answers.get(type(node.ops[0]))
    return None


def _number(node: ast.expr, names: dict[str, int]) -> int | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, int) else None
