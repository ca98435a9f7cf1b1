"""Follows one scenario through SGLang's methods and functions until kernels are called or something raises.

Each function is read by `flow.Flow`, which drops branches that the scenario decides and keeps both sides of the others. A
raise counts as proven when no undecided condition guards it, or when every way out of the function raises.
"""

import ast
import dataclasses
import re
from typing import Any

from nvfp4lab.source.flashinfer_conditions import exception_of
from nvfp4lab.source.flow import Event, Flow, Guard
from nvfp4lab.source.module import Definition
from nvfp4lab.source.routes_layers import method
from nvfp4lab.source.routes_query import Gate, Hop
from nvfp4lab.source.sglang.reading import Reading
from nvfp4lab.source.values import EnumValue, Instance, Scenario, Self

_MAX_DEPTH = 6
# A kernel package by its root, and the words of calls that multiply matrices; the others prepare, quantise or ask.
_KERNEL_ROOTS = (
    "flashinfer",
    "sgl_kernel",
    "deep_gemm",
    "sglang.kernels.ops",
    "sglang.jit_kernel",
    "triton_kernels",
    "aiter",
    "humming",
)
_MULTIPLIES = re.compile(r"moe|gemm|(^|_)mm(_|$)|matmul|grouped|_run$|wrapper\.run", re.I)
_PREPARES = re.compile(
    r"quant(?!_gemm)|swizzle|interleave|shuffle|permut|align|topk|repack|prepare|scale_to|workspace|config|is_|get_|has_|sum_reduce|"
    r"Config|sort|scatter|gather|pad|data|layout|tile|num_tokens|activation|silu|reorder|a2a|alltoall|supported|empty|Enum|Type|Info"
)
_FOLLOWED = re.compile(r"moe|gemm|fused|expert|marlin|cutedsl|cutlass|trtllm|fp4|apply|forward|run|linear|compute|humming", re.I)


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """A call into a kernel package. guards: the undecided conditions on the way to it."""

    dotted: str
    file: str
    line: int
    guards: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A proven raise."""

    text: str
    file: str
    line: int


@dataclasses.dataclass
class Walk:
    """What one scenario was seen to do, in order.

    calls: every call by dotted name, also those that only prepare. written: attributes that loading gave the layer; False
    where an undecided condition guards the writing. runner: backend of the runner object that was built.
    left_to: who runs the experts where the quant method builds no runner on purpose. unseen_import: module that registers
    the fused function, where nothing on the route is seen to import it without a condition.
    """

    hops: list[Hop] = dataclasses.field(default_factory=list)
    gates: list[Gate] = dataclasses.field(default_factory=list)
    kernels: list[KernelCall] = dataclasses.field(default_factory=list)
    calls: list[str] = dataclasses.field(default_factory=list)
    imports: list[str] = dataclasses.field(default_factory=list)
    written: dict[str, bool] = dataclasses.field(default_factory=dict)
    runner: str | None = None
    left_to: str | None = None
    unseen_import: str | None = None
    refusal: Refusal | None = None

    def has(self, test: str) -> bool | None:
        """Answer of `hasattr(layer, 'name')` once the weights are loaded; None for another test or where it is not decided.

        An attribute that loading never writes on this route is taken as absent: other routes' code does not run.
        """
        found = re.fullmatch(r"hasattr\(layer, '(\w+)'\)", test)
        if found is None or not self.written:
            return None
        return (True if self.written[found[1]] else None) if found[1] in self.written else False

    def hop(self, file: str, line: int, why: str) -> None:
        """Add a hop once."""
        found = Hop(file, line, why)
        if found not in self.hops:
            self.hops.append(found)


class Walker:
    """Walks functions of one package for one scenario, adding to `walk`."""

    def __init__(self, reading: Reading, scenario: Scenario, walk: Walk):
        self.reading, self.scenario, self.walk = reading, scenario, walk
        self._visited: set[tuple[str, str]] = set()

    def certain(self, flow: Flow) -> Refusal | None:
        """The proven raise of a function by itself, without what it calls."""
        event = proven_raise(flow)
        return Refusal(_raised(event), flow.definition.file, event.line) if event is not None else None

    def enter(self, definition: Definition, env: dict[str, Any], guards: tuple[Guard, ...] = (), depth: int = 0) -> Flow:
        """Read one function and what it calls. Sets `walk.refusal` when it surely raises."""
        flow = self.reading.flow(definition, self.scenario, env)
        certain = proven_raise(flow) if not guards else None
        for event in flow.events:
            if certain is not None and event is certain:
                self.walk.refusal = Refusal(_raised(event), definition.file, event.line)
                self.walk.hop(definition.file, event.line, f"{definition.scope} raises {event.dotted}")
                break
            self._event(flow, event, guards, depth, env)
            if self.walk.refusal is not None:
                break
        return flow

    def _event(self, flow: Flow, event: Event, guards: tuple[Guard, ...], depth: int, env: dict[str, Any]) -> None:
        held = self._undecided((*guards, *event.guards))
        if held is None:
            return
        self._note_written(event, held)
        if event.kind in ("raise", "assert"):
            self._gate(event, held)
        elif event.kind == "import":
            self.walk.imports.append(event.dotted)
        elif event.kind == "call":
            self.walk.calls.append(event.dotted)
            self._call(flow, event, held, depth, env)

    def _undecided(self, guards: tuple[Guard, ...]) -> tuple[Guard, ...] | None:
        """The guards that stay open once `hasattr(layer, ...)` is answered by what loading wrote; None when one cannot hold."""
        kept = []
        for guard in guards:
            answer = self._layer_has(guard)
            if answer is False:
                return None
            if answer is None:
                kept.append(guard)
        return tuple(kept)

    def _layer_has(self, guard: Guard) -> bool | None:
        parts = guard.undecided or (guard.test,)
        answers = [self.walk.has(ast.unparse(part)) for part in parts]
        whole = False if False in answers else None if None in answers else True
        return whole if guard.holds or whole is None else not whole

    def _note_written(self, event: Event, held: tuple[Guard, ...]) -> None:
        """`layer.name = ...` and helpers that take the layer and the attribute's name as a string."""
        names = []
        if event.kind == "set" and event.dotted.startswith("layer."):
            names = [event.dotted.removeprefix("layer.")]
        elif event.kind == "call" and _writes_by_name(event.node):
            names = [node.value for node in event.node.args[1:2] if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        elif event.kind == "call" and event.dotted == "layer.register_parameter":
            names = [node.value for node in event.node.args[:1] if isinstance(node, ast.Constant)]
        for name in names:
            self.walk.written[name] = self.walk.written.get(name, False) or not held

    def _gate(self, event: Event, held: tuple[Guard, ...]) -> None:
        """A raise or assert that an undecided condition decides."""
        self.walk.gates.append(Gate(f"depends on {said(event, held)}", "depends", event.definition.file, event.line))

    def _call(self, flow: Flow, event: Event, held: tuple[Guard, ...], depth: int, env: dict[str, Any]) -> None:
        dotted = event.dotted
        if is_kernel(dotted):
            self.walk.kernels.append(KernelCall(dotted, event.definition.file, event.line, tuple(guard.text for guard in held)))
            return
        if depth >= _MAX_DEPTH or not _FOLLOWED.search(dotted.rsplit(".", 1)[-1]) or _PREPARES.search(dotted.rsplit(".", 1)[-1]):
            return
        target = self._target(flow, event, env)
        if target is None:
            return
        key = (target.dotted, repr(sorted(_known(flow, event, target).items(), key=str)))
        if key in self._visited or isinstance(target.node, ast.ClassDef):
            return
        self._visited.add(key)
        position, kernels = len(self.walk.hops), len(self.walk.kernels)
        self.enter(target, _known(flow, event, target) | self._self_of(event, env), held, depth + 1)
        if len(self.walk.kernels) > kernels or self.walk.refusal is not None:
            self.walk.hops.insert(position, Hop(event.definition.file, event.line, f"calls {target.scope}"))

    def _target(self, flow: Flow, event: Event, env: dict[str, Any]) -> Definition | None:
        owner = env.get("self")
        if isinstance(owner, Self) and event.dotted.startswith("self.") and event.dotted.count(".") == 1:
            return method(self.reading, owner.owner, event.dotted.removeprefix("self."))
        return self.reading.index.resolve(event.dotted) if event.dotted.startswith("sglang.") else None

    def _self_of(self, event: Event, env: dict[str, Any]) -> dict[str, Any]:
        return {"self": env["self"]} if event.dotted.startswith("self.") and "self" in env else {}


def said(event: Event, held: tuple[Guard, ...]) -> str:
    """A check in words: what an assert requires or a raise raises, and under which open conditions."""
    raised = event.dotted if held else _raised(event)
    text = f"requires {_short(event.node.test)}" if event.kind == "assert" else raised
    return f"{text} when {_and(held)}" if held else text


def _writes_by_name(call: ast.Call) -> bool:
    """`helper(layer, "name", value)`: three arguments at least, so that `hasattr` and `getattr` are not meant."""
    asks = isinstance(call.func, ast.Name) and call.func.id in ("hasattr", "getattr", "delattr")
    return not asks and len(call.args) > 1 and ast.unparse(call.args[0]) == "layer"


def is_kernel(dotted: str) -> bool:
    """Whether a call multiplies matrices in a kernel package."""
    name = dotted.rsplit(".", 1)[-1]
    return dotted.startswith(_KERNEL_ROOTS) and bool(_MULTIPLIES.search(name)) and not _PREPARES.search(name)


def proven_raise(flow: Flow) -> Event | None:
    """The raise or failed assert that is reached whatever is not decided; None when some way does not raise."""
    for event in flow.events:
        if event.kind == "raise" and not event.guards:
            return event
        if event.kind == "assert" and event.value is False and not event.guards and not _rests_on_global(event):
            return event
        if event.kind == "return" and not event.guards:
            return None
    raises = list(flow.of_kind("raise"))
    return raises[-1] if flow.leaves and raises and not list(flow.of_kind("return")) else None


def _rests_on_global(event: Event) -> bool:
    """Whether a test names a module global that some function of the module rebinds: its first value proves nothing."""
    names = {node.id for node in ast.walk(event.node.test) if isinstance(node, ast.Name)}
    rebound = (node for node in ast.walk(event.definition.module.tree) if isinstance(node, ast.Global))
    return any(names & set(node.names) for node in rebound)


def _known(flow: Flow, event: Event, target: Definition) -> dict[str, Any]:
    """Arguments of a call whose values are known, by parameter name of the callee."""
    if not isinstance(event.node, ast.Call) or isinstance(target.node, ast.ClassDef):
        return {}
    names = [argument.arg for argument in (*target.node.args.posonlyargs, *target.node.args.args) if argument.arg != "self"]
    given = dict(zip(names, event.node.args, strict=False))
    given |= {keyword.arg: keyword.value for keyword in event.node.keywords if keyword.arg}
    found = {}
    for name, node in given.items():
        value = flow.env.get(node.id) if isinstance(node, ast.Name) else node.value if isinstance(node, ast.Constant) else None
        if isinstance(value, EnumValue | Instance | bool | str):
            found[name] = value
    return found


def _raised(event: Event) -> str:
    if isinstance(event.node, ast.Raise):
        return f"{exception_of(event.node)}: {event.value}"
    test = event.node.test if isinstance(event.node, ast.Assert) else event.node
    return f"{event.dotted}: requires {_short(test)}"


def _short(node: ast.AST) -> str:
    return " ".join(ast.unparse(node).split())


def _and(guards: tuple[Guard, ...]) -> str:
    return " and ".join(dict.fromkeys(guard.text for guard in guards))
