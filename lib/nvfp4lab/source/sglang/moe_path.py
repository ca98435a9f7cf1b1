"""How one `--moe-runner-backend` reaches a kernel for one quantisation, a2a backend and compute capability.

The stages are those of SGLang: the quant method's `__init__`, `create_moe_runner`, `MoeRunner.__init__`, `apply`, then the
fused function that is registered for (a2a, runner). Each may raise, which ends the path.
"""

import ast
import dataclasses
import re

from nvfp4lab.source.capability import Capability
from nvfp4lab.source.flow import Event, Flow
from nvfp4lab.source.module import Definition
from nvfp4lab.source.sglang import kernel_call, registry
from nvfp4lab.source.sglang.kernel_call import KernelCall
from nvfp4lab.source.sglang.methods import QuantMethod
from nvfp4lab.source.sglang.reading import Reading
from nvfp4lab.source.values import UNKNOWN, EnumValue, Instance, Layer, Scenario, Self

REGISTERED, INLINE, CORE, EP_LAYER, OWN_LAYER = (
    "registered_fused_func",
    "inline_quant_method",
    "runner_core",
    "ep_layer_special_case",
    "fused_moe_layer",
)
_RUN = "self.runner.run"


@dataclasses.dataclass(frozen=True, eq=False)
class Failure:
    """Where a path ends in an exception. stage: the method, as users name it."""

    stage: str
    event: Event

    @property
    def text(self) -> str:
        return f"{self.event.dotted} in {self.stage}"


@dataclasses.dataclass(eq=False)
class MoePath:
    """One path. runner: what MoeRunner was built for; created: that call; failure: set when the path raises.

    wiring: one of the constants above; wired_by: the event that decides it; fused: the registered function.
    """

    backend: str
    a2a: str
    cc: Capability
    scenario: Scenario
    runner: EnumValue | None = None
    created: Event | None = None
    create_flow: Flow | None = None
    core: Event | None = None
    wiring: str = ""
    wired_by: Event | None = None
    fused: registry.FusedFunction | None = None
    fused_flow: Flow | None = None
    kernel: KernelCall | None = None
    failure: Failure | None = None


def begin(
    reading: Reading, method: QuantMethod, backend: str, a2a: str, cc: Capability, topk_format: str | None
) -> tuple[MoePath, Self]:
    """The cheap stages, up to the construction of the runner: they alone look at the capability."""
    flags = {"moe_runner_backend": backend, "moe_a2a_backend": a2a, "get_name": method.name, "topk_format": topk_format}
    path = MoePath(backend, a2a, cc, Scenario.of(cc, **flags))
    this = Self(method.moe)
    for stage in ("__init__", "create_moe_runner"):
        definition = method.moe.methods.get(stage)
        if definition is None:
            continue
        flow = reading.flow(definition, path.scenario, {"self": this})
        if raised := _certain_raise(flow):
            path.failure = Failure(stage, raised)
            return path, this
        if stage == "create_moe_runner":
            path.create_flow = flow
            path.created = next((event for event in flow.of_kind("call") if event.dotted.endswith(".MoeRunner")), None)
    if path.created is not None:
        chosen = path.created.argument(0, "runner_backend")
        path.runner = chosen if isinstance(chosen, EnumValue) else None
    return path, this


def finish(reading: Reading, method: QuantMethod, path: MoePath, this: Self) -> MoePath:
    """The remaining stages: which branch of `apply` runs, and the kernel behind it."""
    if path.failure is not None:
        return path
    if "apply_without_routing_weights" in method.moe.methods and path.a2a == "deepep":
        # the DeepEP layer of these versions never calls `apply`
        _through_ep_layer(reading, method, path, this)
        return path
    if path.a2a == "none" and _through_own_layer(reading, method, path):
        return path
    if path.created is not None and path.runner is not None:
        _build_runner(reading, path)
        if path.failure is not None:
            return path
    _apply(reading, method, path, this)
    return path


def signature(path: MoePath) -> tuple:
    """Paths of equal signature after `begin` end alike, whatever the capability."""
    place = (path.failure.stage, path.failure.event.line) if path.failure else None
    return place, path.runner, path.created.line if path.created else None


def _certain_raise(flow: Flow) -> Event | None:
    return next((event for event in flow.of_kind("raise") if not any(guard.holds for guard in event.guards)), None)


def _build_runner(reading: Reading, path: MoePath) -> None:
    """`MoeRunner.__init__` for the chosen runner; then the registry decides whether a fused function is there."""
    definition = reading.index.resolve(path.created.dotted)
    init = definition.methods.get("__init__") if definition else None
    if init is None:
        return
    flow = reading.flow(init, path.scenario, {"self": Self(definition), "runner_backend": path.runner})
    if raised := _certain_raise(flow):
        path.failure = Failure("MoeRunner.__init__ (no branch)", raised)
        return
    path.core = next((event for event in reversed(flow.events) if event.kind == "set" and event.dotted == "self.runner_core"), None)
    path.fused = registry.lookup(reading, path.a2a, path.runner.value)
    if path.fused is None and path.core is not None and path.core.value is None:
        needs = [event for event in flow.of_kind("raise") if any("fused_func" in guard.text for guard in event.guards)]
        if needs:
            path.failure = Failure("MoeRunner.__init__ (no fused func registered)", needs[0])


def _apply(reading: Reading, method: QuantMethod, path: MoePath, this: Self) -> None:
    definition = method.moe.methods.get(method.apply)
    if definition is None:
        return
    env = {"self": this, "layer": _prepared_layer(reading, method, path, this, definition)}
    flow = reading.flow(definition, path.scenario, env)
    runs = sorted((event for event in flow.of_kind("call") if event.dotted == _RUN), key=_positive_guards)
    raised = next((event for event in flow.of_kind("raise") if not _positive_guards(event)), None)
    if runs and path.runner is not None:
        _through_runner(reading, path, flow, runs[0])
    elif kernel := kernel_call.find(reading, flow, path.scenario):
        path.wiring, path.wired_by, path.kernel = INLINE, kernel.hops[0], kernel
    elif raised is not None:
        path.failure = Failure(f"{method.apply}()", raised)


def _positive_guards(event: Event) -> int:
    return sum(guard.holds for guard in event.guards)


def _through_runner(reading: Reading, path: MoePath, flow: Flow, run: Event) -> None:
    path.wired_by = run
    if path.fused is None:
        path.wiring = CORE
        return
    path.wiring = REGISTERED
    quant_info = next(
        (e.value for e in reversed(flow.events) if e.kind == "set" and e.dotted == "quant_info" and e.line < run.line), None
    )
    env = {"quant_info": quant_info} if isinstance(quant_info, Instance) else {}
    path.fused_flow = reading.flow(path.fused.definition, path.scenario, env)
    path.kernel = kernel_call.find(reading, path.fused_flow, path.scenario)


def _through_ep_layer(reading: Reading, method: QuantMethod, path: MoePath, this: Self) -> None:
    """DeepEP layers of older versions call `apply_without_routing_weights` themselves, past MoeRunner."""
    flow = reading.flow(method.moe.methods["apply_without_routing_weights"], path.scenario, {"self": this})
    refused = next((event for event in flow.of_kind("assert") if event.value is False), None)
    if refused is not None:
        path.failure = Failure("apply_without_routing_weights", refused)
        return
    path.kernel = kernel_call.find(reading, flow, path.scenario)
    if path.kernel is not None:
        returned = [event for event in path.create_flow.of_kind("return")] if path.create_flow else []
        path.wiring, path.wired_by = EP_LAYER, (returned[0] if returned else path.kernel.hops[0])


def _through_own_layer(reading: Reading, method: QuantMethod, path: MoePath) -> bool:
    """A layer class of its own, chosen by `get_moe_impl_class`, whose forward calls the kernel."""
    for chooser in reading.index.functions("get_moe_impl_class"):
        config = Instance(method.config.name) if method.config else UNKNOWN
        flow = reading.flow(chooser, path.scenario, {"quant_config": config})
        returned = next((event for event in flow.of_kind("return") if not _positive_guards(event)), None) or next(
            flow.of_kind("return"), None
        )
        layer = reading.index.resolve(getattr(returned.value, "dotted", "")) if returned else None
        forward = _own_forward(layer) if layer and isinstance(layer.node, ast.ClassDef) else None
        if forward is None:
            continue
        kernel = kernel_call.find(reading, reading.flow(forward, path.scenario, {"self": Self(layer)}), path.scenario)
        if kernel is not None and re.search(r"fp4", kernel.dotted):
            path.wiring, path.wired_by, path.kernel = OWN_LAYER, returned, kernel
            return True
    return False


def _own_forward(layer: Definition) -> Definition | None:
    """The forward of a layer class that derives from FusedMoE; FusedMoE's own goes through the quant method."""
    if not any("FusedMoE" in ast.unparse(base) for base in layer.node.bases):
        return None
    return layer.methods.get("forward_impl") or layer.methods.get("forward")


def _prepared_layer(reading: Reading, method: QuantMethod, path: MoePath, this: Self, apply: Definition) -> object:
    """The layer with the attributes that weight preparation writes, where `apply` asks for one by name."""
    asks = any(isinstance(node, ast.Name) and node.id == "hasattr" for node in ast.walk(apply.node))
    prepare = method.moe.methods.get("process_weights_after_loading")
    if not asks or prepare is None:
        return Layer(frozenset())
    flow = reading.flow(prepare, path.scenario, {"self": this})
    written = {event.dotted.removeprefix("layer.") for event in flow.of_kind("set") if event.dotted.startswith("layer.")}
    for event in flow.of_kind("call"):
        written |= {value for _, value in event.arguments if isinstance(value, str)}
        helper = reading.index.resolve(event.dotted) if event.dotted.startswith("sglang.") else None
        if helper is None and event.dotted.startswith("self."):
            helper = method.moe.methods.get(event.dotted.removeprefix("self."))
        written |= _attributes_written(helper) if helper and not isinstance(helper.node, ast.ClassDef) else set()
    return Layer(frozenset(written))


def _attributes_written(helper: Definition) -> set[str]:
    """Attributes that a helper sets, by assignment or by name through a binding function."""
    found: set[str] = set()
    for node in ast.walk(helper.node):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Call) and len(node.args) >= 2:
            found |= {
                argument.value
                for argument in node.args[1:3]
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            }
    return found
