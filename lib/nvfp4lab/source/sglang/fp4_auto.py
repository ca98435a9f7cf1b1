"""What `--fp4-gemm-backend auto` becomes, and where the resolved backend is kept."""

import ast
from collections import defaultdict
from collections.abc import Iterator

from nvfp4lab.source import capability
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flow import Event, Flow
from nvfp4lab.source.module import Definition
from nvfp4lab.source.sglang.reading import Reading, Spot, spot
from nvfp4lab.source.sglang.vocabulary import ENUMS
from nvfp4lab.source.values import EnumValue, Scenario

_CLASS, _FIELD = ENUMS["fp4_gemm"]


def read(reading: Reading) -> Iterator[Fact]:
    initialiser = initialiser_of(reading, _CLASS, _FIELD)
    if initialiser is None:
        yield reading.not_found("fp4_gemm", "auto_resolves", f"a function that reads {_FIELD} and makes a {_CLASS}", "all modules")
        return
    yield from stored_in(reading, "fp4_gemm", _CLASS, initialiser)
    resolved: dict[tuple[str, Spot], list[capability.Capability]] = defaultdict(list)
    origin: dict[tuple[str, Spot], Event] = {}
    for cc in capability.KNOWN:
        flow = reading.flow(initialiser, Scenario.of(cc, **{_FIELD: "auto"}))
        kept = _kept(flow)
        event = _origin(flow, kept.value.value) if kept and isinstance(kept.value, EnumValue) else None
        if event is not None and kept.value.value != "auto":
            resolved[kept.value.value, spot(event)].append(cc)
            origin[kept.value.value, spot(event)] = event
    for (value, at), admitted in resolved.items():
        also = [(at[0], line) for line in origin[value, at].decided]
        for when in _ways(reading, admitted):
            yield reading.fact("fp4_gemm", "auto_resolves", value, at, when=when, also=also, scope=initialiser.scope)
    if not resolved:
        yield from _unresolved(reading, initialiser)


def initialiser_of(reading: Reading, enum_class: str, field: str) -> Definition | None:
    """The function that turns the flag into the enum: it reads `field` and calls the enum's class or resolver."""
    for module in reading.index.modules(enum_class.encode(), field.encode()):
        for definition in module.functions():
            reads = any(isinstance(node, ast.Attribute) and node.attr == field for node in ast.walk(definition.node))
            if reads and definition.name.startswith("initialize_"):
                return definition
    return None


def stored_in(reading: Reading, subject: str, enum_class: str, initialiser: Definition) -> Iterator[Fact]:
    """Where the initialiser keeps the backend: a module global, or an attribute of a runtime object."""
    makers = (enum_class, "resolve_moe_runner_backend", "resolve_fp4_gemm_runner_backend")
    origins = {
        node.targets[0].id: ast.unparse(node.value)
        for node in initialiser.node.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for node in ast.walk(initialiser.node):
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
            continue
        if not isinstance(node.value.func, ast.Name) or node.value.func.id not in makers:
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name):
            value = f"module global {target.id}"
        else:
            base, _, rest = ast.unparse(target).partition(".")
            value = f"{origins.get(base, base)}.{rest}"
        yield reading.fact(subject, "stored_in", value, (initialiser.file, node.lineno), scope=initialiser.scope)
        return


def _kept(flow: Flow) -> Event | None:
    """The last assignment of a backend enum member."""
    return next((event for event in reversed(flow.events) if event.kind == "set" and isinstance(event.value, EnumValue)), None)


def _origin(flow: Flow, value: str) -> Event | None:
    """The assignment of the string that became the member; the member's own where the string is not spelled out."""
    spelled = [
        event
        for event in flow.of_kind("set")
        if event.value == value and isinstance(getattr(event.node, "value", None), ast.Constant | ast.IfExp)
    ]
    return spelled[-1] if spelled else _kept(flow)


def _ways(reading: Reading, admitted: list[capability.Capability]) -> list[dict[str, object]]:
    """The customary forms of a set of capabilities; all of them where the condition is not restricted at all."""
    return capability.when(admitted) or [{}]


def _unresolved(reading: Reading, initialiser: Definition) -> Iterator[Fact]:
    """`auto` stays a member of the enum: then it is FlashInfer that gets the word and chooses."""
    enum = reading.vocabulary.enums.get("fp4_gemm")
    method = enum.methods.get("get_flashinfer_backend") if enum else None
    if method is None or "auto" not in enum.members.values():
        return
    flow = reading.flow(method, Scenario(), {"self": EnumValue(enum.name, "auto")})
    returned = next(flow.of_kind("return"), None)
    if returned is not None and returned.value == "auto":
        kept = [(initialiser.file, node.lineno) for node in ast.walk(initialiser.node) if isinstance(node, ast.Assign)]
        value = 'not resolved by sglang; passed to flashinfer as backend="auto"'
        yield reading.fact(
            "fp4_gemm",
            "auto_resolves",
            value,
            (method.file, returned.line),
            when={"backend": "auto"},
            also=kept[-1:],
            scope=method.scope,
        )
