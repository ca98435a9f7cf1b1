"""The route of one `--moe-runner-backend` value: layer class, quant method, runner, fused function, kernel."""

import ast
import dataclasses
import functools
from typing import Any

from nvfp4lab.source.evaluate import Frame
from nvfp4lab.source.flow import Event, Flow
from nvfp4lab.source.module import Definition
from nvfp4lab.source.routes_fused import Registered, registry
from nvfp4lab.source.routes_layers import QuantClasses, apply_of, bases, method, moe_layer
from nvfp4lab.source.routes_query import Gate, Hop, Query
from nvfp4lab.source.routes_walk import KernelCall, Refusal, Walk, Walker, said
from nvfp4lab.source.sglang.reading import Reading
from nvfp4lab.source.values import UNKNOWN, EnumValue, Instance, Scenario, Self

FIELD = "moe_runner_backend"
_PREPARATION = "process_weights_after_loading"


@dataclasses.dataclass(eq=False)
class MoeTracer:
    """Traces the MoE of one quantisation in one SGLang."""

    reading: Reading
    classes: QuantClasses

    @functools.cached_property
    def fused(self) -> dict[tuple[str, str], Registered]:
        return registry(self.reading)

    def trace(self, query: Query, backend: str) -> Walk:
        """Walk one backend value from the constructor of the quant method to the kernels of the first forward."""
        walk, scenario = Walk(), query.scenario(**{FIELD: backend})
        walker = Walker(self.reading, scenario, walk)
        quant_method = Self(self.classes.moe)
        layer, chooser, line = moe_layer(self.reading, self.classes.config, scenario)
        if chooser is not None:
            walk.hop(chooser.file, line, f"the MoE layer is {layer.name if layer else 'not decided by source'}")
        self._layer_switches(walk, scenario, layer)
        for name in ("__init__", "create_weights", _PREPARATION):
            self._method(walker, quant_method, name)
        runner = self._create_runner(walker, quant_method, query)
        self._note_absent_runner(walk, layer, quant_method, query)
        if walk.refusal is None and walk.left_to is None:
            self._forward(walker, layer, quant_method, runner, query)
        return walk

    def preparation(self, query: Query, backend: str) -> tuple[str, ...]:
        """Names of what the weight preparation calls and sets, in order: what two backends must share to share weights."""
        scenario, owner = query.scenario(**{FIELD: backend}), Self(self.classes.moe)
        self._method(Walker(self.reading, scenario, Walk()), owner, "__init__")
        prepare = method(self.reading, self.classes.moe, _PREPARATION)
        flow = self.reading.flow(prepare, scenario, {"self": owner}) if prepare else None
        return tuple(event.dotted for event in flow.of_kind("call", "set") if "." in event.dotted) if flow else ()

    def _layer_switches(self, walk: Walk, scenario: Scenario, layer: Definition | None) -> None:
        """Attributes that the layer's constructor switches on because of the runner backend."""
        constructor = method(self.reading, self._base_layer(layer), "__init__") if layer else None
        if constructor is None:
            return
        for event in self.reading.flow(constructor, scenario, {"self": Self(layer)}).of_kind("set"):
            source = ast.unparse(event.node.value) if getattr(event.node, "value", None) is not None else ""
            if event.value is True and "runner_backend" in source:
                walk.hop(constructor.file, event.line, f"{event.dotted.removeprefix('self.')} is set")

    def _base_layer(self, layer: Definition) -> Definition:
        """The class whose constructor does the work: the last of the package's own in the chain of bases."""
        return bases(self.reading, layer)[-1]

    def _method(self, walker: Walker, owner: Self, name: str) -> Flow | None:
        """Enter one method of the quant method unless something raised before; note what it enables."""
        found = method(self.reading, owner.owner, name)
        if found is None or walker.walk.refusal is not None:
            return None
        before = set(owner.attributes)
        kernels = len(walker.walk.kernels)
        flow = walker.enter(found, {"self": owner})
        del walker.walk.kernels[kernels:]  # what loading calls is preparation, not the forward
        for event in flow.of_kind("set"):
            attribute = event.dotted.removeprefix("self.")
            if event.value is True and event.dotted.startswith("self.") and attribute not in before:
                walker.walk.hop(found.file, event.line, f"{attribute} is set")
        return flow

    def _create_runner(self, walker: Walker, owner: Self, query: Query) -> EnumValue | None:
        """Backend of the MoeRunner that `create_moe_runner` builds; None when it builds none."""
        walk = walker.walk
        flow = self._method(walker, owner, "create_moe_runner")
        built = next((event for event in flow.of_kind("call") if _is(event.value, "MoeRunner")), None) if flow else None
        if built is None or walk.refusal is not None:
            return None
        argument = built.node.args[0] if built.node.args else None
        backend = (
            self.reading.evaluator(walker.scenario).value(argument, Frame(flow.definition, flow.definition.module, flow.env))
            if argument is not None
            else None
        )
        if not isinstance(backend, EnumValue):
            return None
        walk.runner = backend.value
        walk.hop(flow.definition.file, built.line, f"builds a MoeRunner for {backend.value}")
        self._runner_object(walker, backend, query)
        return backend

    def _note_absent_runner(self, walk: Walk, layer: Definition | None, owner: Self, query: Query) -> None:
        """`self.runner = None` on purpose: this a2a or the model's own block runs the experts, and `apply` is not reached."""
        absent = "runner" in owner.attributes and owner.attributes["runner"] is None
        if absent and walk.refusal is None and self._entry_name(layer) == "apply":
            walk.left_to = f"the experts of a2a {query.a2a}, outside this quant method"
            create = method(self.reading, owner.owner, "create_moe_runner")
            walk.hop(create.file, create.line, f"builds no runner: left to {walk.left_to}")

    def _runner_object(self, walker: Walker, backend: EnumValue, query: Query) -> None:
        """The runner's constructor: its core, or the fused function that must be registered."""
        walk = walker.walk
        runner = next(iter(self.reading.index.classes("MoeRunner")), None)
        constructor = method(self.reading, runner, "__init__") if runner else None
        if constructor is None:
            return
        owner = Self(runner)
        gates = len(walk.gates)
        flow = walker.enter(constructor, {"self": owner, constructor.node.args.args[1].arg: backend})
        if walk.refusal is not None:
            return
        del walk.gates[gates:]
        core, extension = _core(flow)
        raised = _main_path_raise(flow)
        if raised is not None and core is not None:
            self._refuse(walk, flow, raised.line, said(raised, ()), extension)
            return
        self._fused_or_core(walk, flow, backend, core, extension, query)

    def _fused_or_core(self, walk: Walk, flow: Flow, backend: EnumValue, core: Any, extension: bool, query: Query) -> None:
        """What will run the experts: a registered function, a runner core, or nothing."""
        key, file = (query.a2a, backend.value), flow.definition.file
        registered = self.fused.get(key)
        refused = next((event for event in flow.of_kind("raise") if "fused_func" in "".join(g.text for g in event.guards)), None)
        line = refused.line if refused else flow.definition.line
        if registered is not None:
            name, home = registered.function.name, registered.function.module.dotted
            why = registered.reached_by([*walk.imports, *self._imports_of(flow)])
            walk.hop(registered.function.file, registered.line, f"fused function {name} for {key}; {why or 'import not shown'}")
            if why is None:
                walk.unseen_import = home
                walk.gates.append(Gate(f"depends on the import of {home}: without it MoeRunner raises", "depends", file, line))
        elif isinstance(core, Instance):
            walk.hop(file, core.line, f"runner core {core.type_name}, no fused function for {key}")
        elif core is None:
            text = f"NotImplementedError: runner {backend.value} needs a fused function for a2a {query.a2a}, none is registered"
            self._refuse(walk, flow, line, text, extension)

    def _refuse(self, walk: Walk, flow: Flow, line: int, text: str, extension: bool) -> None:
        unless = ", unless an extension brings a runner core" if extension else ""
        walk.refusal = Refusal(text + unless, flow.definition.file, line)
        walk.hop(flow.definition.file, line, f"{flow.definition.scope} raises")

    def _imports_of(self, flow: Flow) -> list[str]:
        return [event.dotted for event in flow.of_kind("import")]

    def _forward(self, walker: Walker, layer: Definition | None, owner: Self, runner: EnumValue | None, query: Query) -> None:
        """The first forward: the layer's own kernel where its class has one, else the quant method's apply."""
        entry = self._layer_entry(layer)
        if entry is not None and not _applies_quant_method(entry):
            walker.walk.hop(entry.file, entry.line, f"{entry.scope} calls the kernel itself")
            walker.enter(entry, {"self": Self(layer)})
            return
        apply = apply_of(self.reading, owner.owner, self._entry_name(layer))
        if apply is None:
            return
        flow = walker.enter(apply, {"self": owner})
        _note_branch(walker.walk, flow)
        ran = next((event for event in flow.of_kind("call") if event.dotted == "self.runner.run"), None)
        if ran is not None and walker.walk.refusal is None and runner is not None:
            walker.walk.hop(apply.file, ran.line, "hands over to runner.run")
            self._run(walker, flow, runner, query)

    def _layer_entry(self, layer: Definition | None) -> Definition | None:
        """The forward of a MoE layer class that overrides it; `forward_impl` where the class splits it."""
        if layer is None:
            return None
        own = next((found for name in ("forward_impl", "forward") if (found := layer.methods.get(name))), None)
        return own if len(bases(self.reading, layer)) > 1 else None

    def _entry_name(self, layer: Definition | None) -> str:
        """`apply`, or the other method of the quant method that this layer class calls instead."""
        return _called_of_quant_method(layer) if layer else "apply"

    def _run(self, walker: Walker, flow: Flow, runner: EnumValue, query: Query) -> None:
        registered = self.fused.get((query.a2a, runner.value))
        info = next((e.value for e in reversed(flow.events) if isinstance(e.value, Instance) and "Info" in e.value.type_name), None)
        env: dict[str, Any] = {"quant_info": info} if info else {}
        if registered is not None:
            walker.enter(registered.function, env)
            self._wrapper_run(walker.walk, registered.function)

    def _wrapper_run(self, walk: Walk, function: Definition) -> None:
        """A wrapper object is made once and run later: its `run` is the kernel call, not its constructor."""
        made = next((call.dotted for call in walk.kernels if call.dotted.endswith("Wrapper")), None)
        calls = (node for node in ast.walk(function.node) if isinstance(node, ast.Call))
        ran = next((node for node in calls if ast.unparse(node.func).endswith("wrapper.run")), None)
        if made is not None and ran is not None:
            walk.kernels[:] = [KernelCall(f"{made}.run", function.file, ran.lineno)]


def _main_path_raise(flow: Flow) -> Event | None:
    """A raise of the built-in chain: what stands before it is only what an extension or another raise would have taken."""
    own = (event for event in flow.of_kind("raise") if event.guards and not any(guard.holds for guard in event.guards))
    return next(own, None)


def _core(flow: Flow) -> tuple[Any, bool]:
    """(the runner core that the constructor sets, whether an extension may set another).

    What an undecided condition would have to hold for is an extension's; the built-in chain is on the other side of it.
    """
    found = [event for event in flow.of_kind("set") if event.dotted == "self.runner_core"]
    own = [event.value for event in found if not any(guard.holds for guard in event.guards)]
    return (own[-1] if own else UNKNOWN), len(own) < len(found)


@functools.cache
def _called_of_quant_method(layer: Definition) -> str:
    text = "\n".join(ast.unparse(found.node) for found in layer.methods.values())
    other = "apply_without_routing_weights"
    return other if f"quant_method.{other}(" in text and "quant_method.apply(" not in text else "apply"


def _is(value: Any, type_name: str) -> bool:
    return isinstance(value, Instance) and value.type_name == type_name


def _note_branch(walk: Walk, flow: Flow) -> None:
    """The branch of `apply` that this backend takes: the condition around what it calls, or none of them."""
    name = flow.definition
    leading = [hop.line for hop in walk.hops if hop.file == name.file and hop.why.startswith("calls ")]
    leading += [kernel.line for kernel in walk.kernels if kernel.file == name.file]
    leading += [event.line for event in flow.of_kind("call") if event.dotted == "self.runner.run"]
    inside = [line for line in leading if name.line <= line <= (name.node.end_lineno or name.line)]
    if not inside:
        return
    branch = _innermost_if(name.node, inside[0])
    hop = Hop(name.file, inside[0], f"no branch of {name.scope} names this backend: it falls through to here")
    if branch is not None:
        hop = Hop(name.file, branch.lineno, f"branch taken: if {' '.join(ast.unparse(branch.test).split())}")
    after = (index for index, other in enumerate(walk.hops) if other.file == name.file and other.line in inside)
    walk.hops.insert(next(after, len(walk.hops)), hop)


def _innermost_if(function: ast.AST, line: int) -> ast.If | None:
    found = [node for node in ast.walk(function) if isinstance(node, ast.If) and any(_spans(inner, line) for inner in node.body)]
    return max(found, key=lambda node: node.lineno, default=None)


def _spans(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _applies_quant_method(entry: Definition) -> bool:
    text = ast.unparse(entry.node)
    return "quant_method.apply" in text or "run_moe_core" in text or "super().forward" in text
