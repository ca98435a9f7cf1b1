"""What the FusedMoE layer, top-k and the token dispatchers do differently for a runner backend."""

import ast
import re
from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flow import Event, Flow
from nvfp4lab.source.module import Definition
from nvfp4lab.source.sglang.methods import methods_by_name
from nvfp4lab.source.sglang.reading import Reading, chain, per_reading, spot
from nvfp4lab.source.values import EnumValue, Reference, Scenario, Self

_UNNAMED = "\0a backend that no branch names"
_A2A_OF_DISPATCHER = {"Standard": "none", "Flashinfer": "flashinfer", "DeepEP": "deepep", "Mooncake": "mooncake", "Nixl": "nixl"}


def read(reading: Reading) -> Iterator[Fact]:
    enum = reading.vocabulary.enums.get("moe_runner")
    if enum is None:
        return
    layers = reading.index.classes("FusedMoE")
    if not layers:
        yield reading.not_found("moe_runner", "layer", "class FusedMoE", "all modules of the package")
    for backend in enum.members.values():
        yield from _topk(reading, backend)
        for layer in layers:
            yield from _layer(reading, layer, backend)
    for layer in layers:
        yield from _scaling(reading, layer)
        yield from _enabling_properties(reading, layer)
    yield from _dispatchers(reading)


@per_reading
def _topk_output(reading: Reading, backend: str) -> Event | None:
    """The assignment of `output_format` in TopK for one backend: in its forward, or where it is bound to the experts."""
    for topk, method in _topk_methods(reading):
        env = {"self": Self(topk), "runner_backend": _runner(reading, backend)}
        flow = reading.flow(method, _scenario(reading, backend), env)
        for event in flow.of_kind("set"):
            if (
                event.dotted == "output_format"
                and isinstance(event.node.value, ast.IfExp)
                and not isinstance(event.value, Reference)
            ):
                return None  # depends on more than the backend
            if event.dotted == "output_format" and isinstance(event.value, Reference):
                return event
    return None


@per_reading
def _topk_methods(reading: Reading) -> list[tuple[Definition, Definition]]:
    """Methods of TopK that choose the output format, those that look at a runner backend first."""
    found = [
        (topk, method, ast.unparse(method.node))
        for topk in reading.index.classes("TopK")
        for method in topk.methods.values()
        if any("output_format = " in line for line in topk.module.lines[method.node.lineno : method.node.end_lineno])
    ]
    choosing = [row for row in found if "TopKOutputFormat" in row[2]]
    return [(topk, method) for topk, method, _ in sorted(choosing, key=lambda row: "runner_backend" not in row[2])]


def _runner(reading: Reading, backend: str) -> EnumValue:
    return EnumValue(reading.vocabulary.enums["moe_runner"].name, backend)


@per_reading
def _scenario(reading: Reading, backend: str, nvfp4: bool = False) -> Scenario:
    """The backend as global flag, and as the `runner_backend` that newer layers get from their quant method.

    nvfp4: also that method itself, ModelOpt's after its `__init__`; else the layer may have any method.
    """
    flags = {"moe_runner_backend": backend, "runner_backend": _runner(reading, backend)}
    method = methods_by_name(reading).get("modelopt_fp4") if nvfp4 else None
    if method is not None and method.moe is not None and "__init__" in method.moe.methods:
        flags["quant_method"] = this = Self(method.moe)
        reading.flow(method.moe.methods["__init__"], Scenario.of(None, **flags), {"self": this})
    return Scenario.of(None, **flags)


def topk_format(reading: Reading, backend: str) -> str | None:
    """Name of the top-k format that a backend is given, such as "BYPASSED"."""
    event = _topk_output(reading, backend)
    return event.value.dotted.rsplit(".", 1)[-1] if event else None


def _topk(reading: Reading, backend: str) -> Iterator[Fact]:
    event = _topk_output(reading, backend)
    if event is not None:
        yield reading.fact(
            f"moe:{backend}",
            "topk_format",
            topk_format(reading, backend),
            spot(event),
            also=chain(event),
            scope=event.definition.scope,
        )


@per_reading
def _layer_flows(reading: Reading, layer: Definition, backend: str, nvfp4: bool) -> tuple[Flow, ...]:
    this = Self(layer)
    scenario = _scenario(reading, backend, nvfp4)
    names = [name for name in layer.methods if name.startswith("_set_runner")]
    names += [name for name in layer.methods if name == "__init__" or name.startswith(("_weight_loader", "weight_loader"))]
    return tuple(reading.flow(layer.methods[name], scenario, {"self": this}) for name in names)


def _layer(reading: Reading, layer: Definition, backend: str) -> Iterator[Fact]:
    """Padding and shard order that only this backend gets: whatever the quantisation, and for ModelOpt NVFP4."""
    for nvfp4, subject in ((False, f"moe:{backend}"), (True, f"moe:{backend}:modelopt_fp4")):
        other = {(event.kind, event.line) for flow in _layer_flows(reading, layer, _UNNAMED, nvfp4) for event in flow.events}
        own = (event for flow in _layer_flows(reading, layer, backend, nvfp4) for event in flow.events)
        for event in (event for event in own if (event.kind, event.line) not in other):
            if event.kind == "call" and event.dotted.endswith("round_up") and "intermediate" in ast.unparse(event.node):
                text = f"intermediate size rounded up: {ast.unparse(event.node)}"
                yield _fact(reading, subject, "weight_prep_padding", text, event)
            elif event.kind == "set" and _swaps_shards(event.node):
                yield _fact(reading, f"moe:{backend}:modelopt_fp4", "weight_prep_shard_swap", "w1<->w3 swapped at load", event)


def _fact(reading: Reading, subject: str, predicate: str, value: str, event: Event) -> Fact:
    return reading.fact(subject, predicate, value, spot(event), also=chain(event), scope=event.definition.scope)


def _swaps_shards(node: ast.AST) -> bool:
    """`{"w1": "w3", "w3": "w1", ...}[shard_id]`"""
    value = getattr(node, "value", None)
    if not (isinstance(value, ast.Subscript) and isinstance(value.value, ast.Dict)):
        return False
    pairs = {
        getattr(k, "value", None): getattr(v, "value", None) for k, v in zip(value.value.keys, value.value.values, strict=True)
    }
    return pairs.get("w1") == "w3" and pairs.get("w3") == "w1"


def _scaling(reading: Reading, layer: Definition) -> Iterator[Fact]:
    """Backends for which the routed scaling factor is not folded into top-k of the NVFP4 method."""
    for holder, expression in _scaling_expressions(layer):
        parts = (inner for inner in ast.walk(expression) if isinstance(inner, ast.BoolOp) and isinstance(inner.op, ast.And))
        for part in parts:
            words = ast.unparse(part)
            excluded = re.search(r"\bnot (?!None)(.*)", words)
            if "NvFp4" not in words or excluded is None:
                continue
            calls = [inner for inner in ast.walk(part) if isinstance(inner, ast.Call)]
            at = (layer.file, max(call.end_lineno for call in calls))
            lines = {line for call in calls for line in (call.lineno, call.end_lineno)} | {expression.lineno}
            text = "routed scaling factor not fused into top-k"
            also = [(layer.file, line) for line in sorted(lines)]
            for backend in re.findall(r"\.is_(\w+)\(\)", excluded[1]):
                yield reading.fact(f"moe:{backend}:modelopt_fp4", "side_effect", text, at, also=also, scope=holder.scope)


def _scaling_expressions(layer: Definition) -> Iterator[tuple[Definition, ast.expr]]:
    """What decides `..._routed_scaling_factor_in_topk`: assigned in the layer, or returned by a function of that name."""
    init = layer.methods.get("__init__")
    for node in ast.walk(init.node) if init else ():
        if isinstance(node, ast.Assign) and "routed_scaling_factor_in_topk" in ast.unparse(node.targets[0]):
            yield init, node.value
    for definition in layer.module.functions():
        if "routed_scaling_factor_in_topk" in definition.name:
            yield from (
                (definition, node.value) for node in ast.walk(definition.node) if isinstance(node, ast.Return) and node.value
            )


def _enabling_properties(reading: Reading, layer: Definition) -> Iterator[Fact]:
    """Attributes such as `enable_flashinfer_cutlass_moe` by which the layer switches a backend on."""
    for method in layer.methods.values():
        for node in ast.walk(method.node):
            targets = node.targets if isinstance(node, ast.Assign) else []
            names = [target.attr for target in targets if isinstance(target, ast.Attribute)]
            if not names and method.name.startswith(("enable_", "use_")) and isinstance(node, ast.Return):
                names = [method.name]
            found = re.search(r"backend(?:\(\))?\.is_(\w+)\(\)", ast.unparse(node)) if names else None
            if found and names[0].startswith(("enable_", "use_")):
                yield reading.fact(f"moe:{found[1]}", "enabled_by", names[0], (layer.file, node.lineno), scope=method.scope)


def _dispatchers(reading: Reading) -> Iterator[Fact]:
    """Branches of token dispatchers that look at the runner backend, such as the FP4 all-gather."""
    members = reading.index.search(rb"^class \w*Dispatcher\w*\b", b"Dispatcher")
    words = (b"get_moe_runner_backend()", b"runner_backend.is_", b"should_use_flashinfer_cutlass_moe_fp4_allgather")
    mentioned = {member for word in words for member in reading.index.mentioning(word)}
    for module in (module for member in members if member in mentioned and (module := reading.index.module(member))):
        for definition in module.functions():
            owner = definition.scope.split(".")[0]
            if not owner.endswith("Dispatcher") and "Dispatcher" not in owner:
                continue
            a2a = next((value for word, value in _A2A_OF_DISPATCHER.items() if owner.startswith(word)), None)
            for node in ast.walk(definition.node):
                yield from _dispatcher_case(reading, definition, node, a2a)


def _dispatcher_case(reading: Reading, definition: Definition, node: ast.AST, a2a: str | None) -> Iterator[Fact]:
    if not isinstance(node, ast.If | ast.Assign | ast.IfExp | ast.Return):
        return
    expression = node.value if isinstance(node, ast.Assign | ast.Return) else node.test
    words = ast.unparse(expression) if expression is not None else ""
    named = re.search(r"runner_backend(?:\(\))?\.is_(\w+)\(\)", words) or re.search(
        r"should_use_(flashinfer_cutlass)_moe_fp4_allgather", words
    )
    if named:
        subject = ast.unparse(node.targets[0]).removeprefix("self.") if isinstance(node, ast.Assign) else "branch"
        yield reading.fact(
            f"moe:{named[1]}",
            "dispatcher_special_case",
            f"{subject}: {words}",
            (definition.file, node.lineno),
            when={"a2a": a2a} if a2a else {},
            also=[(definition.file, expression.lineno)],
            scope=definition.scope,
        )
