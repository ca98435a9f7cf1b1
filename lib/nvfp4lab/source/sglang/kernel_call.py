"""From a function to the kernel it ends in: through SGLang's own functions to the first call that leaves them."""

import ast
import dataclasses
import re
from typing import Any

from nvfp4lab.source.flow import Event, Flow
from nvfp4lab.source.module import Definition, FunctionNode, Module
from nvfp4lab.source.sglang.reading import Reading, Spot, chain, spot
from nvfp4lab.source.values import Scenario, Unknown

_OUTSIDE = ("flashinfer.", "sgl_kernel.", "sglang.jit_kernel.", "sglang.kernels.", "deep_gemm.", "vllm.")
_KERNEL = re.compile(r"(mm|gemm|moe)", re.I)
_NOT_THE_KERNEL = re.compile(
    r"(quant(?!_method)|align|sort|topk|top_k|reduce|permut|prepare|workspace|scatter|gather|_sum|^is_|^get_|^_?ensure|register|info|checker|"
    r"combine|config|type|prewarm|params|supported|should)",
    re.I,
)
_MAX_HOPS = 4


@dataclasses.dataclass(frozen=True)
class KernelCall:
    """The kernel by its dotted name and every hop on the way; the last event is the call itself."""

    dotted: str
    hops: tuple[Event, ...]

    @property
    def spot(self) -> Spot:
        return spot(self.hops[-1])

    def also(self) -> list[Spot]:
        """Lines of the other hops and of the conditions on the way."""
        return [place for event in self.hops for place in chain(event)]


def find(reading: Reading, flow: Flow, scenario: Scenario, hops: tuple[Event, ...] = ()) -> KernelCall | None:
    """The kernel that the flow's function ends in, or None.

    Calls that depend on fewest undecided conditions come first: an optional fast path is not the route.
    """
    candidates = [event for event in flow.of_kind("call") if _may_lead(event)]
    tried = _tried_first(flow)
    candidates.sort(key=lambda event: (event.line in tried, sum(guard.holds for guard in event.guards)))
    for event in candidates:
        if found := _follow(reading, event, scenario, hops, flow):
            return found
    return None


def _tried_first(flow: Flow) -> set[int]:
    """Lines of calls that may decline: `out = try_it(...)`, then `if out is not None: return out`. They serve special shapes."""
    declinable = {
        branch.test.left.id
        for branch in ast.walk(flow.definition.node)
        if isinstance(branch, ast.If)
        and isinstance(branch.test, ast.Compare)
        and isinstance(branch.test.ops[0], ast.IsNot)
        and isinstance(branch.test.left, ast.Name)
        and any(isinstance(node, ast.Return) for node in branch.body)
    }
    return {
        event.node.value.lineno
        for event in flow.of_kind("set")
        if event.dotted in declinable and isinstance(event.node, ast.Assign)
    }


def _may_lead(event: Event) -> bool:
    name = event.dotted.rsplit(".", 1)[-1]
    is_wrapper = name == "run" and event.dotted.split(".")[-2].endswith("wrapper") if "." in event.dotted else False
    return is_wrapper or (not _NOT_THE_KERNEL.search(name) and not name[:1].isupper())


def _follow(reading: Reading, event: Event, scenario: Scenario, hops: tuple[Event, ...], flow: Flow) -> KernelCall | None:
    name = event.dotted.rsplit(".", 1)[-1]
    if name == "run" and (wrapped := _wrapper_class(event)):
        return KernelCall(f"{wrapped}.run", (*hops, event))
    if event.dotted.startswith(_OUTSIDE):
        return KernelCall(event.dotted, (*hops, event)) if _KERNEL.search(name) else None
    if len(hops) >= _MAX_HOPS or not re.search(r"(moe|gemm|mm|experts|cutlass|linear|trtllm|marlin|run|cutedsl|apply)", name):
        return None
    callee = reading.index.resolve(event.dotted)
    if (
        callee is None
        or not isinstance(callee.node, FunctionNode)
        or any(callee.node is hop.definition.node for hop in (*hops, event))
    ):
        return None
    inner = reading.flow(callee, scenario, _passed(event, callee))
    return find(reading, inner, scenario, (*hops, event))


def _passed(event: Event, callee: Definition) -> dict[str, Any]:
    """Arguments that the callee may branch on, by its parameter names."""
    parameters = [argument.arg for argument in callee.node.args.args]
    known = ((parameters[key] if isinstance(key, int) and key < len(parameters) else key, value) for key, value in event.arguments)
    return {name: value for name, value in known if isinstance(name, str) and not isinstance(value, Unknown)}


def _wrapper_class(event: Event) -> str | None:
    """`x.wrapper.run(...)`: the class that the module assigns to an attribute of that ending."""
    attribute = event.dotted.split(".")[-2]
    for definition in event.definition.module.functions():
        for node in ast.walk(definition.node):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and isinstance(node.targets[0], ast.Attribute):
                if not node.targets[0].attr.endswith(attribute) or not isinstance(node.value.func, ast.Name):
                    continue
                targets = sorted(definition.imports.get(node.value.func.id, ()))
                if targets:
                    return targets[0].dotted
    return None


def wrapper_spots(event: Event) -> list[Spot]:
    """Where the wrapper of a `.run(...)` call is made, for the chain of evidence; nothing for other calls."""
    if not event.dotted.endswith(".run"):
        return []
    attribute = event.dotted.split(".")[-2] if "." in event.dotted else event.dotted
    module: Module = event.definition.module
    return [
        (module.member, node.lineno)
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and isinstance(node.targets[0], ast.Attribute)
        and node.targets[0].attr.endswith(attribute)
    ]


def imported_at(definition: Definition, dotted: str) -> list[Spot]:
    """Lines that import a callee into the function that calls it."""
    return [
        (definition.file, target.line) for targets in definition.imports.values() for target in targets if target.dotted == dotted
    ]
