"""What `--moe-runner-backend auto` becomes: every rule that writes the field, and the conditions under which it does.

A rule is tried for each compute capability, all-to-all backend and quantisation that can matter. What all tries that
reach the write have in common is its `when`; conditions that source does not decide stay as `depends_on`.
"""

import ast
import dataclasses
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from nvfp4lab.source import capability
from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flow import Event
from nvfp4lab.source.module import Definition
from nvfp4lab.source.sglang import fp4_auto, rules
from nvfp4lab.source.sglang.reading import Reading, Spot, chain, spot
from nvfp4lab.source.sglang.vocabulary import ENUMS
from nvfp4lab.source.values import Scenario

_MODELOPT = ("modelopt_fp4", "modelopt_fp8", "modelopt_mixed")
_QUANTIZATIONS = (*_MODELOPT, "fp8", "awq", None)  # awq: stands for every method that no rule of NVFP4 names
_CHECKPOINT_WORDS = ("get_quantization_config", "get_model_config", "model_config_of", "model_config", "quant_method")


@dataclasses.dataclass(frozen=True)
class _Try:
    cc: capability.Capability
    a2a: str
    quantization: str | None


def read(reading: Reading) -> Iterator[Fact]:
    fields = [(subject, ENUMS[subject][1], "auto") for subject in ("moe_runner", "fp4_gemm")]
    # the draft model's runner: not given means that a rule decides
    fields.append(("speculative_moe_runner", "speculative_moe_runner_backend", None))
    for subject, field, unresolved in fields:
        for definition in rules.functions(reading, field):
            if not definition.name.startswith("initialize_"):
                yield from _rule(reading, rules.sliced(definition, field), subject, field, unresolved)
    yield from _storage(reading)


def _storage(reading: Reading) -> Iterator[Fact]:
    """Where the resolved runner is kept, and who fills it."""
    enum_class, field = ENUMS["moe_runner"]
    initialiser = fp4_auto.initialiser_of(reading, enum_class, field)
    if initialiser is None:
        yield reading.not_found("moe_runner", "stored_in", f"an initialize_* function that reads {field}", "all modules")
        return
    yield from fp4_auto.stored_in(reading, "moe_runner", enum_class, initialiser)
    for module in reading.index.modules(f"{initialiser.name}(".encode()):
        for caller in module.functions():
            for call in (node for node in ast.walk(caller.node) if isinstance(node, ast.Call)):
                if isinstance(call.func, ast.Name) and call.func.id == initialiser.name:
                    at = (module.member, call.lineno)
                    yield reading.fact("moe_runner", "initialised_from", module.dotted, at, scope=caller.scope)


def _rule(reading: Reading, definition: Definition, subject: str, field: str, unresolved: str | None) -> Iterator[Fact]:
    first = reading.flow(definition, Scenario.of(None, **{field: unresolved}))
    if not any(_written(event, field) is not None for event in first.events):
        return
    reached: dict[tuple[str, Spot, str], list[_Try]] = defaultdict(list)
    events: dict[tuple[str, Spot, str], Event] = {}
    tries = _tries(reading, definition)
    for attempt in tries:
        flags = {field: unresolved, "moe_a2a_backend": attempt.a2a, "quantization": attempt.quantization}
        flow = reading.flow(definition, Scenario.of(attempt.cc, **flags))
        for event in flow.events:
            if (value := _written(event, field)) in (None, "auto"):
                continue
            key = (value, spot(event), _depends_on(event))
            reached[key].append(attempt)
            events.setdefault(key, event)
    for key, attempts in reached.items():
        yield from _site(reading, definition, subject, field, events[key], attempts, tries)


def _tries(reading: Reading, definition: Definition) -> list[_Try]:
    words = {node.attr for node in ast.walk(definition.node) if isinstance(node, ast.Attribute)}
    words |= {node.id for node in ast.walk(definition.node) if isinstance(node, ast.Name)}
    minor_matters = any(word in words for word in ("get_device_capability", "device_capability", "get_device_sm", "is_sm120"))
    ccs = capability.KNOWN if minor_matters else tuple((major, 0) for major in capability.MAJORS)
    a2a = reading.vocabulary.enums.get("moe_a2a")
    a2as = dict.fromkeys(["none", "deepep", *(rules.literals(definition, a2a.members.values()) if a2a else ())])
    return [_Try(cc, backend, quantization) for cc in ccs for backend in a2as for quantization in _QUANTIZATIONS]


def _written(event: Event, field: str) -> str | None:
    """The backend that an event writes to `field`, as attribute, dict entry, returned dict or keyword."""
    if event.kind == "set":
        hits = event.dotted in (field, f"['{field}']") or event.dotted.endswith(f".{field}")
        return event.value if hits and isinstance(event.value, str) else None
    if event.kind == "return" and isinstance(event.value, dict):
        value = event.value.get(field)
        return value if isinstance(value, str) and _spelled(event.node, value) else None
    if event.kind == "call" and isinstance(event.node, ast.Call):
        keywords = [word.value for word in event.node.keywords if word.arg == field]
        return keywords[0].value if keywords and isinstance(keywords[0], ast.Constant) else None
    return None


def _spelled(node: ast.AST, value: str) -> bool:
    return any(isinstance(part, ast.Constant) and part.value == value for part in ast.walk(node))


def _site(
    reading: Reading,
    definition: Definition,
    subject: str,
    field: str,
    event: Event,
    attempts: list[_Try],
    tries: list[_Try],
) -> Iterator[Fact]:
    value, at = _written(event, field), spot(event)
    reached = {quantization: {(t.cc, t.a2a) for t in attempts if t.quantization == quantization} for quantization in _QUANTIZATIONS}
    if not reached["modelopt_fp4"]:
        return
    known = [method for method in _MODELOPT if reading.index.mentioning(method.encode())]  # 0.5.9 has no modelopt_mixed
    name = "quantization" if _reads_checkpoint(definition) else "quantization_flag"
    restricted = not all(reached.values())
    forms: list[dict[str, Any]] = []
    for layout in _layouts(reached["modelopt_fp4"], tries):
        forms.append(layout | ({name: "modelopt_fp4"} if restricted else {}))
        if restricted and len(known) > 1 and all(reached[method] == reached["modelopt_fp4"] for method in known):
            forms.append(layout)  # no ModelOpt checkpoint is treated differently
    if _is_last_resort(event):
        forms.append({"otherwise": True})
    depends = _depends_on(event)
    for form in forms:
        for arch in _arch_conditions(reading, definition, event):
            when = form | arch | ({"depends_on": depends} if depends else {})
            yield reading.fact(subject, "auto_resolves", value, at, when=when, also=_chain(event, field), scope=definition.scope)


def _layouts(reached: set[tuple[capability.Capability, str]], tries: list[_Try]) -> Iterator[dict[str, Any]]:
    """`when` forms for the (capability, a2a) pairs that reach a write: one form where they are a product, else first the
    capabilities that reach it with any a2a, then the rest with theirs."""
    ccs, a2as = list(dict.fromkeys(t.cc for t in tries)), list(dict.fromkeys(t.a2a for t in tries))
    with_any = [cc for cc in ccs if all((cc, a2a) in reached for a2a in a2as)]
    if with_any:
        yield from capability.when(with_any, ccs) or [{}]
    rest = [cc for cc in ccs if cc not in with_any and any((cc, a2a) in reached for a2a in a2as)]
    for chosen in dict.fromkeys(tuple(a2a for a2a in a2as if (cc, a2a) in reached) for cc in rest):
        same = [cc for cc in rest if tuple(a2a for a2a in a2as if (cc, a2a) in reached) == chosen]
        for form in capability.when(same, ccs) or [{}]:
            yield form | {"a2a": chosen[0] if len(chosen) == 1 else list(chosen)}


def _chain(event: Event, field: str) -> list[Spot]:
    keywords = event.node.keywords if isinstance(event.node, ast.Call) else []
    return [*chain(event), *((event.definition.file, word.value.lineno) for word in keywords if word.arg == field)]


def _arch_conditions(reading: Reading, definition: Definition, event: Event) -> list[dict[str, Any]]:
    """The architectures by name, and as the family that users know."""
    names = rules.archs(reading, definition, event)
    if not names:
        return [{}]
    return [{"model_arch": names}, {"model_family": rules.family(names[0])}]


def _reads_checkpoint(definition: Definition) -> bool:
    """The rule looks at the checkpoint, so the quantisation it tests is the effective one, not only the server argument."""
    names = {node.id for node in ast.walk(definition.node) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(definition.node) if isinstance(node, ast.Attribute)}
    return any(word in names for word in _CHECKPOINT_WORDS)


def _depends_on(event: Event) -> str:
    """Undecided conditions that must hold, other than the architecture and whether a value was unset by hand."""
    parts = [
        part
        for guard in event.guards
        if guard.holds
        for part in guard.undecided
        if not rules.is_about_archs(part) and "explicitly_unset" not in ast.unparse(part)
    ]
    return " and ".join(" ".join(ast.unparse(part).split()) for part in parts)


def _is_last_resort(event: Event) -> bool:
    """The write stands directly in the final `else` of its chain: it holds otherwise."""
    branches = (node for node in ast.walk(event.definition.node) if isinstance(node, ast.If))
    return any(statement is event.node for branch in branches for statement in branch.orelse)
