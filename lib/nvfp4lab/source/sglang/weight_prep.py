"""Weight preparation: what happens to NVFP4 weights after loading, for each backend, and what it requires."""

import ast
import dataclasses
import re
from collections.abc import Iterator

from nvfp4lab.source.capability import Capability
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flow import Event, Flow
from nvfp4lab.source.module import Definition, FunctionNode
from nvfp4lab.source.sglang import moe
from nvfp4lab.source.sglang.methods import QuantMethod, methods_by_name
from nvfp4lab.source.sglang.reading import Reading, Spot, chain, spot
from nvfp4lab.source.sglang.vocabulary import ENUMS
from nvfp4lab.source.values import Scenario, Self

_STEP = re.compile(r"(align|shuffle|swizzle|interleave|prepare_|repack|(^|_)pad(_|$)|convert_sf|blockscale|reorder|permute)", re.I)
_NOT_A_STEP = re.compile(r"^(reshape|contiguous|permute|view)$")
_BLACKWELL: Capability = (10, 0)
_AMPERE: Capability = (8, 0)


def read(reading: Reading) -> Iterator[Fact]:
    for method in methods_by_name(reading).values():
        if method.linear is not None:
            yield from _for_backends(reading, method, method.linear, "fp4_gemm", ("none",))
        if method.moe is not None:
            yield from _for_backends(reading, method, method.moe, "moe_runner", ("none", "flashinfer", "deepep"))


def _for_backends(
    reading: Reading, method: QuantMethod, owner: Definition, enum_subject: str, a2as: tuple[str, ...]
) -> Iterator[Fact]:
    enum = reading.vocabulary.enums.get(enum_subject)
    prepare = owner.methods.get("process_weights_after_loading")
    if enum is None or prepare is None:
        return
    prefix = "fp4_gemm" if enum_subject == "fp4_gemm" else "moe"
    required: dict[Spot, list[Fact]] = {}
    backends = [backend for backend in enum.members.values() if backend != "auto"]
    if prefix == "moe":
        backends = [backend for backend in backends if moe.is_reached(reading, method, backend)]
    for backend in backends:
        subject = f"{prefix}:{backend}:{method.name}"
        flows = {a2a: _prepared(reading, owner, prepare, ENUMS[enum_subject][1], backend, a2a) for a2a in a2as}
        yield from _steps(reading, subject, flows)
        for fact in _requirements(reading, subject, flows["none"]):
            required.setdefault((fact.file, fact.line), []).append(fact)
    for facts in required.values():
        yield from _shared(facts, f"{prefix}:*:{method.name}", len(backends))


def _shared(facts: list[Fact], subject: str, backends: int) -> list[Fact]:
    """What every backend is required is said once for all of them."""
    if len({fact.subject for fact in facts}) < backends:
        return facts
    return [dataclasses.replace(fact, subject=subject) for fact in facts if fact.subject == facts[0].subject]


def _prepared(reading: Reading, owner: Definition, prepare: Definition, field: str, backend: str, a2a: str) -> Flow:
    """The flow on Blackwell, or on Ampere to Hopper where Blackwell is not what the backend is for."""
    for cc in (_BLACKWELL, _AMPERE):
        scenario = Scenario.of(cc, **{field: backend, "moe_a2a_backend": a2a})
        this = Self(owner)
        if init := owner.methods.get("__init__"):
            reading.flow(init, scenario, {"self": this})
        flow = reading.flow(prepare, scenario, {"self": this})
        if not any(event.kind == "raise" and not event.guards for event in flow.events):
            break
    return flow


def _steps(reading: Reading, subject: str, flows: dict[str, Flow]) -> Iterator[Fact]:
    """One fact for each distinct list of preparing calls; its `when` names the a2a backends that get it."""
    by_steps: dict[tuple[str, ...], list[str]] = {}
    for a2a, flow in flows.items():
        by_steps.setdefault(tuple(dict.fromkeys(_step_name(event) for event in _step_events(flow))), []).append(a2a)
    for steps, a2as in by_steps.items():
        if not steps:
            continue
        flow = flows[a2as[0]]
        events = _step_events(flow)
        also = [place for event in events for place in [*chain(event), *_argument_spots(event)]]
        also += list(_loading_order(flow.definition, subject))
        when = {} if len(by_steps) == 1 else {"a2a": a2as[0] if len(a2as) == 1 else a2as}
        yield reading.fact(
            subject, "weight_prep", "; ".join(steps), spot(events[0]), when=when, also=also, scope=flow.definition.scope
        )


def _step_events(flow: Flow) -> list[Event]:
    found = []
    for event in flow.of_kind("call"):
        name = _step_name(event)
        if _STEP.search(name) and not _NOT_A_STEP.match(name):
            found.append(event)
    return found


def _step_name(event: Event) -> str:
    return event.dotted.rsplit(".", 1)[-1]


def _argument_spots(event: Event) -> list[Spot]:
    return [(event.definition.file, node.lineno) for node in event.node.args]


def _loading_order(prepare: Definition, subject: str) -> Iterator[Spot]:
    """Lines of `load_up_proj_weight_first` that name this backend: the order of gate and up is part of the layout."""
    backend = subject.split(":")[1]
    owner = prepare.module.definitions.get(prepare.scope.split(".")[0])
    order = owner.methods.get("load_up_proj_weight_first") if owner else None
    for node in ast.walk(order.node) if order else ():
        if isinstance(node, ast.Attribute) and backend.removeprefix("flashinfer_") in node.attr:
            yield prepare.file, node.lineno


def _requirements(reading: Reading, subject: str, flow: Flow) -> Iterator[Fact]:
    """What preparation raises on: here and in the helpers that it calls for this backend."""
    yield from _raises(reading, subject, flow)
    for event in _step_events(flow):
        helper = reading.index.resolve(event.dotted)
        if helper is not None and isinstance(helper.node, FunctionNode):
            inner = reading.flow(helper, Scenario())
            yield from _raises(reading, subject, inner)
            yield from _paddings(reading, subject, inner)


def _raises(reading: Reading, subject: str, flow: Flow) -> Iterator[Fact]:
    for event in flow.of_kind("raise", "assert"):
        if event.kind == "raise" and not event.guards:
            continue
        test = event.node.test if event.kind == "assert" else event.guards[-1].test
        words = " ".join(ast.unparse(test).split())
        if event.kind == "assert" and ("shape" in words or "ndim" in words) and "is_gated" not in words:
            continue  # internal consistency, not a condition on the model
        requirement = words if event.kind == "assert" else f"not ({words})"
        refused = f"not ({words})" if event.kind == "assert" else words
        where = {"also": chain(event), "scope": event.definition.scope}
        yield reading.fact(subject, "raises_on", f"{refused} -> {event.dotted}", spot(event), **where)
        yield reading.fact(subject, "requires", requirement, spot(event), **where)
        if "size_n" in words or "output_size" in words:
            yield reading.fact(subject, "requires_n", requirement, spot(event), **where)
        if "size_k" in words or "input_size" in words:
            yield reading.fact(subject, "requires_k", requirement, spot(event), **where)
        if "dtype" in words:
            yield reading.fact(subject, "requires_dtype", requirement, spot(event), **where)


def _paddings(reading: Reading, subject: str, flow: Flow) -> Iterator[Fact]:
    """Sizes that a helper rounds up."""
    for event in flow.of_kind("set"):
        if re.match(r"padded_\w*size", event.dotted) and isinstance(getattr(event.node, "value", None), ast.BinOp | ast.Call):
            when = {"is_gated": False} if any("not" in guard.text and "is_gated" in guard.text for guard in event.guards) else {}
            text = f"{event.dotted} = {ast.unparse(event.node.value)}"
            yield reading.fact(
                subject, "weight_prep_padding", text, spot(event), when=when, also=chain(event), scope=event.definition.scope
            )
