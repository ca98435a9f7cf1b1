"""Traps: what a route does that its flag does not say. Found by comparing readings, never by version."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

from nvfp4lab.source.facts import Fact, Facts
from nvfp4lab.source.routes_moe import MoeTracer
from nvfp4lab.source.routes_query import FLAGS, Gate, Operation, Query
from nvfp4lab.source.routes_server import Resolution, resolutions
from nvfp4lab.source.routes_walk import Walk

# One capability of each kind that an NVFP4 server may run on: what raises on all of these can only fail.
_SPREAD = ("9.0", "10.0", "12.0")


def of_moe(
    tracer: MoeTracer, facts: Facts, query: Query, backend: str, resolved: Resolution, walk: Walk, expected: str
) -> list[str]:
    """Traps of one MoE route besides those of its gates."""
    found = []
    unresolved = backend == "auto" and resolved.backend == "auto" and walk.left_to is None
    if unresolved and query.capability[0] >= 10:
        found.append(_unresolved(tracer, facts, query, walk, expected))
    return found


def _unresolved(tracer: MoeTracer, facts: Facts, query: Query, walk: Walk, expected: str) -> str:
    """`auto` that nobody resolved: what it ends in, and which flag would have resolved it."""
    given = resolutions(facts, "moe", "auto", dataclasses.replace(query, flag_given=True))
    would = given[0].backend if given and given[0].backend != "auto" and not given[0].when else None
    cure = f"; with --quantization {query.quant} on the command line it becomes {would}" if would and not query.flag_given else ""
    start = f"{FLAGS['moe']} auto is left unresolved on {query.cc}"
    if expected.startswith("raises"):
        return f"{start} and can only raise: {walk.refusal.text if walk.refusal else expected}{cure}"
    mismatch = _weights_for_another(tracer, query, walk.runner) if walk.runner else None
    if mismatch:
        return f"{start}: it takes the {walk.runner} branch with weights prepared as for {mismatch}{cure}"
    return f"{start} and falls to {final_of(walk)}{cure}"


def _weights_for_another(tracer: MoeTracer, query: Query, runner: str) -> str | None:
    """The backend as which `auto` prepares the weights, where that is not the runner which gets them."""
    if not _uses_runner(tracer, query):
        return None
    prepared = tracer.preparation(query, "auto")
    if prepared == tracer.preparation(query, runner):
        return None
    values = tracer.reading.vocabulary.enums["moe_runner"].members.values()
    same = [value for value in values if value not in ("auto", runner) and tracer.preparation(query, value) == prepared]
    preferred = [value for value in same if "cutlass" in value]
    return (preferred or same or ["no backend of its own"])[0]


def _uses_runner(tracer: MoeTracer, query: Query) -> bool:
    """Whether the first forward of an unresolved `auto` really hands over to the runner object that was built."""
    return any(hop.why.startswith("hands over") for hop in tracer.trace(query, "auto").hops)


def of_failure(
    op: Operation, query: Query, backend: str, accepted: Fact | None, fails: Callable[[Query], bool], expected: str
) -> Iterator[str]:
    """A value that the command line takes and that raises. fails: whether SGLang raises for the value under a question."""
    if accepted is None or not expected.startswith("raises"):
        return
    said = f"{FLAGS[op]} {backend} is accepted by the command line"
    other_flag = dataclasses.replace(query, flag_given=not query.flag_given)
    if fails(query) and not fails(other_flag):
        yield f"{said}, but raises {'with' if query.flag_given else 'without'} --quantization {query.quant} beside it"
    elif fails(query) and (causes := _deployment_causes(query, fails)):
        yield f"{said}, but {query.quant} can only fail with it beside {' and '.join(causes)}"
    elif fails(query) and all(fails(dataclasses.replace(query, cc=cc)) for cc in _SPREAD if cc != query.cc):
        yield f"{said}, but {query.quant} can only fail with it, on every GPU"
    else:
        yield f"{said}, but {query.quant} can only fail with it on {query.cc}"


def _deployment_causes(query: Query, fails: Callable[[Query], bool]) -> list[str]:
    """What of the question is not the default and would, taken back alone, end the failure: it is not the GPU's then."""
    defaults = {
        f"--moe-a2a-backend {query.a2a}": {"a2a": "none"},
        f"tp {query.tp}, ep {query.ep}": {"tp": 1, "ep": 1},
        "experts that are not gated": {"gated": True},
    }
    without = {cause: dataclasses.replace(query, **default) for cause, default in defaults.items()}
    return [cause for cause, other in without.items() if other != query and not fails(other)]


def of_gates(gates: Iterable[Gate]) -> Iterator[str]:
    """A capability list that excludes the GPU and that nothing enforces: the call goes through to a kernel not meant for it."""
    for gate in gates:
        if gate.state == "failed" and not gate.refuses:
            yield f"not enforced: {gate.text}"


def elsewhere(backend: str, walk: Walk, final_call: str) -> str | None:
    """Where a value goes whose name no branch knows and whose words the kernel does not carry."""
    fell = any("falls through" in hop.why for hop in walk.hops)
    plain = final_call.lower().replace("_", "")  # cutedsl is spelled cute_dsl elsewhere
    missing = [word for word in backend.split("_") if word.lower() not in plain]
    return final_call if fell and missing and backend != "auto" else None


def final_of(walk: Walk) -> str:
    """The kernel that the walk ends in; "not found" where it calls none that is known as one."""
    named = [kernel for kernel in walk.kernels if not kernel.dotted.rsplit(".", 1)[-1].startswith("try_")]
    return named[-1].dotted if named else "not found"
