"""Fused MoE of NVFP4: how each runner backend is wired, the kernel it ends in, and where it can only raise."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from nvfp4lab.source import capability
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flow import Event
from nvfp4lab.source.sglang import kernel_call, moe_path, registry
from nvfp4lab.source.sglang.methods import QuantMethod, methods_by_name
from nvfp4lab.source.sglang.moe_layer import topk_format
from nvfp4lab.source.sglang.moe_path import MoePath
from nvfp4lab.source.sglang.reading import Reading, Spot, chain, per_reading, spot
from nvfp4lab.source.values import EnumValue

_CCS = tuple((major, 0) for major in capability.MAJORS)


def read(reading: Reading) -> Iterator[Fact]:
    enum = reading.vocabulary.enums.get("moe_runner")
    if enum is None:
        return
    for method in methods_by_name(reading).values():
        if method.moe is None:
            yield reading.not_found(f"moe:*:{method.name}", "wiring", "the MoE method that get_quant_method returns", method.name)
            continue
        for backend in enum.members.values():
            yield from _backend(reading, method, backend)
        yield from _any_backend(reading, method)


@per_reading
def paths(reading: Reading, method: QuantMethod, backend: str, a2a: str) -> list[tuple[list[capability.Capability], MoePath]]:
    """Paths of one backend, with the capabilities that take each."""
    format_ = topk_format(reading, backend)
    groups: dict[tuple, list[capability.Capability]] = defaultdict(list)
    begun: dict[tuple, tuple] = {}
    for cc in _CCS:
        path, this = moe_path.begin(reading, method, backend, a2a, cc, format_)
        key = moe_path.signature(path)
        groups[key].append(cc)
        begun[key] = (path, this)  # the latest capability stands for its group
    return [(ccs, moe_path.finish(reading, method, *begun[key])) for key, ccs in groups.items()]


def is_reached(reading: Reading, method: QuantMethod, backend: str) -> bool:
    """Whether any capability and a2a backend leads past construction for this runner backend."""
    return any(path.failure is None for a2a in a2as(reading, method, backend) for _, path in paths(reading, method, backend, a2a))


def a2as(reading: Reading, method: QuantMethod, backend: str) -> list[str]:
    """All-to-all backends that can matter to a runner: none, those it is registered for, and DeepEP's own entry."""
    keys = [key.a2a for key in registry.fused_functions(reading) if key.runner == backend]
    known = reading.vocabulary.enums["moe_a2a"].members.values() if "moe_a2a" in reading.vocabulary.enums else keys
    extra = ["deepep"] if "apply_without_routing_weights" in method.moe.methods else []
    return [a2a for a2a in dict.fromkeys(["none", *keys, *extra]) if a2a in known]


def _backend(reading: Reading, method: QuantMethod, backend: str) -> Iterator[Fact]:
    taken = {a2a: paths(reading, method, backend, a2a) for a2a in a2as(reading, method, backend)}
    if backend == "auto":
        yield from _auto(reading, method, taken["none"])
        return
    subject = f"moe:{backend}:{method.name}"
    reached = {a2a: path for a2a, groups in taken.items() for _, path in groups if path.failure is None}
    yield from _wiring(reading, subject, reached)
    yield from _final_calls(reading, subject, reached)
    for a2a, groups in taken.items():
        for ccs, path in groups:
            if path.failure is not None and (a2a == "none" or not _fails_everywhere(taken["none"])):
                yield from _failure(reading, subject, path, ccs)
    for a2a, path in reached.items():
        yield from _requirements(reading, subject, a2a, path)


def _fails_everywhere(groups: list[tuple[list, MoePath]]) -> bool:
    return all(path.failure is not None for _, path in groups)


def _wiring(reading: Reading, subject: str, reached: dict[str, MoePath]) -> Iterator[Fact]:
    for a2a, path in reached.items():
        if not path.wiring:
            continue
        for when in _whens(a2a):
            yield reading.fact(
                subject, "wiring", path.wiring, _wiring_spot(path), when=when, also=_wiring_chain(reading, path), scope=_scope(path)
            )
    path = reached.get("none")
    if path is not None and path.core is not None:
        at = spot(path.core)
        yield reading.fact(
            subject, "has_runner_core", path.core.value is not None, at, also=chain(path.core), scope=path.core.definition.scope
        )


def _whens(a2a: str) -> list[dict[str, Any]]:
    """`none` is the default a2a backend: what holds for it is also said without a condition."""
    return [{"a2a": a2a}, {}] if a2a == "none" else [{"a2a": a2a}]


def _wiring_spot(path: MoePath) -> Spot:
    return path.fused.spot if path.wiring == moe_path.REGISTERED else spot(path.wired_by)


def _scope(path: MoePath) -> str:
    return path.fused.definition.scope if path.fused else path.wired_by.definition.scope


def _wiring_chain(reading: Reading, path: MoePath) -> list[Spot]:
    """Where the runner is built, the imports on the way, the branch of apply, and the method that an EP layer calls."""
    spots = chain(path.wired_by)
    if path.created is not None:
        spots += [*chain(path.created), *((path.created.definition.file, node.lineno) for node in path.created.node.args)]
    if path.create_flow is not None:
        spots += [place for event in path.create_flow.of_kind("import") for place in chain(event)]
        spots += [(path.create_flow.definition.file, line) for event in path.create_flow.events for line in event.decided]
    if path.kernel is not None and path.wiring in (moe_path.EP_LAYER, moe_path.OWN_LAYER):
        spots.append((path.kernel.hops[0].definition.file, path.kernel.hops[0].definition.line))
    return spots


def _final_calls(reading: Reading, subject: str, reached: dict[str, MoePath], **conditions: Any) -> Iterator[Fact]:
    for a2a, path in reached.items():
        if path.kernel is None:
            continue
        for when in _whens(a2a):
            yield final_call(reading, subject, path, when | conditions)


def final_call(reading: Reading, subject: str, path: MoePath, when: dict[str, Any]) -> Fact:
    """The fact of one path's kernel, with every hop as evidence."""
    kernel = path.kernel
    last = kernel.hops[-1]
    also = [*kernel.also(), *kernel_call.wrapper_spots(last), *kernel_call.imported_at(last.definition, kernel.dotted)]
    if path.wired_by is not None:
        also += chain(path.wired_by)
    return reading.fact(
        subject,
        "final_call",
        kernel.dotted,
        kernel.spot,
        when=when,
        also=also,
        scope=last.definition.scope,
        derived=len(kernel.hops) > 1,
    )


def _failure(reading: Reading, subject: str, path: MoePath, ccs: list[capability.Capability]) -> Iterator[Fact]:
    event = path.failure.event
    also = chain(event)
    if path.created is not None:
        also += chain(path.created)
    form = (capability.when(ccs, _CCS) or [{}])[0]
    when = form | ({"a2a": path.a2a} if path.failure.stage != "__init__" else {})
    yield reading.fact(
        subject, "raises_on", path.failure.text, spot(event), when=when, also=also, scope=event.definition.scope, derived=True
    )


def _any_backend(reading: Reading, method: QuantMethod) -> Iterator[Fact]:
    """What the method's `__init__` refuses whatever the backend: judged with a backend that no branch names."""
    path, _ = moe_path.begin(reading, method, "\0none", "none", (7, 5), None)
    refused = [cc for cc in _CCS if moe_path.begin(reading, method, "\0none", "none", cc, None)[0].failure]
    if path.failure is not None and path.failure.stage == "__init__":
        event = path.failure.event
        when = (capability.when(refused, _CCS) or [{}])[-1]
        yield reading.fact(
            f"moe:*:{method.name}",
            "raises_on",
            path.failure.text,
            spot(event),
            when=when,
            also=chain(event),
            scope=event.definition.scope,
        )


def _auto(reading: Reading, method: QuantMethod, groups: list[tuple[list[capability.Capability], MoePath]]) -> Iterator[Fact]:
    """`auto` that no rule resolved: what the quant method itself makes of it."""
    subject = f"moe:auto:{method.name}"
    for ccs, path in groups:
        unresolved = {"auto_left_unresolved": True}
        form = (capability.when(ccs, _CCS) or [{}])[0]
        below_blackwell = all(cc < (10, 0) for cc in ccs)
        whens = [form] if below_blackwell else [form | unresolved]
        if method.name != "modelopt_fp4":
            whens = [{}, form]
        if path.runner is not None and path.created is not None:
            yield from _auto_runner(reading, subject, path, whens)
        if path.failure is not None and path.failure.stage != "__init__":
            event = path.failure.event
            text = f"{path.failure.text}, at first forward" if path.failure.stage.endswith("()") else path.failure.text
            also = [*chain(event), *(chain(path.created) if path.created else [])]
            yield reading.fact(
                subject, "raises_on", text, spot(event), when=whens[0], also=also, scope=event.definition.scope, derived=True
            )
        if path.kernel is not None:
            places = [{"a2a": "none"}, {}] if method.name != "modelopt_fp4" else [{"a2a": "none"}]
            for when in places:
                extra = unresolved if method.name == "modelopt_fp4" and not below_blackwell else {}
                yield final_call(reading, subject, path, when | extra)


def _auto_runner(reading: Reading, subject: str, path: MoePath, whens: list[dict[str, Any]]) -> Iterator[Fact]:
    """The runner object that is built; it may never be used, which is said."""
    chosen = _choice(path)
    used = path.wiring in (moe_path.REGISTERED, moe_path.CORE)
    value = path.runner.value if used else f"{path.runner.value} (runner object only)"
    arguments = [(path.created.definition.file, node.lineno) for node in path.created.node.args]
    also = [*chain(chosen), *chain(path.created), *arguments]
    for when in whens:
        yield reading.fact(subject, "auto_resolves", value, spot(chosen), when=when, also=also, scope=chosen.definition.scope)
    text = f"{path.runner.value.upper()} MoeRunner is built"
    yield reading.fact(subject, "runner_object", text, spot(chosen), when=whens[0], also=also, scope=chosen.definition.scope)


def _choice(path: MoePath) -> Event:
    """The assignment that replaced `auto`, or the construction of the runner itself."""
    spelled = [
        event
        for event in path.create_flow.of_kind("set")
        if isinstance(event.value, EnumValue) and event.value == path.runner and event.dotted != "self._moe_runner_backend"
    ]
    return spelled[-1] if spelled else path.created


def _requirements(reading: Reading, subject: str, a2a: str, path: MoePath) -> Iterator[Fact]:
    """Assertions of the fused function."""
    for event in path.fused_flow.of_kind("assert") if path.fused_flow else ():
        text = " ".join(ast.unparse(event.node.test).split())
        yield reading.fact(
            subject, "requires", text, spot(event), when={"a2a": a2a}, also=chain(event), scope=event.definition.scope
        )
