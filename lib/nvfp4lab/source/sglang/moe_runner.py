"""MoeRunner itself: which backends have a runner core, which only a fused function, and what it refuses."""

from collections.abc import Iterator

from nvfp4lab.source.facts import Fact
from nvfp4lab.source.flow import Event
from nvfp4lab.source.sglang.reading import Reading, chain, condition, spot
from nvfp4lab.source.values import EnumValue, Scenario, Self


def read(reading: Reading) -> Iterator[Fact]:
    enum = reading.vocabulary.enums.get("moe_runner")
    runner = next(iter(reading.index.classes("MoeRunner")), None)
    init = runner.methods.get("__init__") if runner else None
    if enum is None or init is None:
        yield reading.not_found("moe_runner", "has_runner_core", "class MoeRunner with __init__", "all modules of the package")
        return
    flows = {
        value: reading.flow(init, Scenario.of(None), {"self": Self(runner), "runner_backend": EnumValue(enum.name, value)})
        for value in enum.members.values()
    }
    cores = {value: [e for e in flow.of_kind("set") if e.dotted == "self.runner_core"] for value, flow in flows.items()}
    yield from _fused_only(reading, cores)
    yield from _no_fused_function(reading, flows)
    for value, flow in flows.items():
        for event in _own_raises(flow.of_kind("raise"), flows, value):
            text = f"{condition(event)} -> {event.dotted}"
            yield reading.fact(f"moe:{value}", "raises_on", text, spot(event), also=chain(event), scope=event.definition.scope)


def _fused_only(reading: Reading, cores: dict[str, list[Event]]) -> Iterator[Fact]:
    """Backends whose core is None: without a registered fused function they cannot run."""
    fused_only = {value: events[-1] for value, events in cores.items() if events and events[-1].value is None}
    if fused_only:
        events = sorted(fused_only.values(), key=lambda event: event.line)
        also = [place for event in events for place in chain(event)]
        yield reading.fact(
            "moe_runner:fused_only", "branches", list(fused_only), spot(events[0]), also=also, scope="MoeRunner.__init__"
        )
    for value, events in cores.items():
        if events:
            at, has_core = spot(events[-1]), events[-1].value is not None
            yield reading.fact(f"moe:{value}", "has_runner_core", has_core, at, also=chain(events[-1]), scope="MoeRunner.__init__")


def _no_fused_function(reading: Reading, flows: dict) -> Iterator[Fact]:
    for flow in flows.values():
        for event in flow.of_kind("raise"):
            if any("fused_func is None" in guard.text for guard in event.guards):
                text = f"runner_core is None and no fused func for (a2a, runner) -> {event.dotted}"
                yield reading.fact("moe_runner", "raises_on", text, spot(event), also=chain(event), scope=event.definition.scope)
                return


def _own_raises(raises: Iterator[Event], flows: dict, value: str) -> Iterator[Event]:
    """Raises that happen for this backend and for few others: those of its own branch."""
    for event in raises:
        shared = sum(any(other.line == event.line for other in flow.of_kind("raise")) for flow in flows.values())
        if shared <= len(flows) // 2 and not any("fused_func" in guard.text for guard in event.guards):
            yield event
