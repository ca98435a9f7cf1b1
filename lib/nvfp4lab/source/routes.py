"""One route per backend value: from the flag through SGLang to the kernel, and what FlashInfer says there.

Sound by rule: what is provably constant for the query is evaluated; for every other condition both branches are kept, and
the gate or alternative says `depends on <condition>`.
"""

import dataclasses
import functools
import os
from collections.abc import Container, Iterator

from nvfp4lab.errors import LabError
from nvfp4lab.source import flashinfer_facts, routes_flashinfer, routes_server, routes_traps, sglang_facts
from nvfp4lab.source.facts import Fact, Facts
from nvfp4lab.source.index import Index, no_garbage_collection
from nvfp4lab.source.package import Package, resolve
from nvfp4lab.source.routes_dense import DenseTracer
from nvfp4lab.source.routes_layers import quant_classes
from nvfp4lab.source.routes_moe import MoeTracer
from nvfp4lab.source.routes_query import FLAG_FIELDS, FLAGS, LOST_ENUM, WORKS, Gate, Hop, Operation, Query, Route
from nvfp4lab.source.routes_server import Resolution
from nvfp4lab.source.routes_walk import Refusal, Walk
from nvfp4lab.source.sglang.reading import Reading
from nvfp4lab.source.values import Self


def open_router(sglang: str | os.PathLike, flashinfer: str | os.PathLike | None = None) -> "Router":
    """Router for a VERSION, wheel file, installed folder or checkout of each package.

    flashinfer: None takes the version that SGLang pins; "none" asks no FlashInfer. Raises LabError as `package.resolve`,
    and when SGLang pins none.
    """
    package = resolve(sglang, "sglang")
    facts = sglang_facts.read_cached(package)
    if flashinfer is None:
        pinned = Facts(facts).query("package", "requires_flashinfer")
        if not pinned:
            raise LabError(f"sglang {package.version} pins no FlashInfer; say which one, or 'none'")
        flashinfer = str(pinned[0].value)
    other = None if flashinfer == "none" else resolve(flashinfer, "flashinfer")
    return Router(package, facts, other)


class Router:
    """Routes of one SGLang beside one FlashInfer (None: FlashInfer is not asked).

    facts: those of SGLang, which say what the flags accept and what `auto` becomes.
    """

    def __init__(self, sglang: Package, facts: list[Fact], flashinfer: Package | None, index: Index | None = None):
        self.reading = Reading(index or Index(sglang))
        self.facts = Facts(facts)
        self.version = sglang.version
        self.flashinfer_version = flashinfer.version if flashinfer is not None else None
        self.names = f"sglang {sglang.version}" + (f", flashinfer {flashinfer.version}" if flashinfer else "")
        self.flashinfer = Facts(flashinfer_facts.read_cached(flashinfer)) if flashinfer is not None else None
        self._classes = functools.cache(lambda quant: quant_classes(self.reading, quant))
        self._tracers = functools.cache(self._tracer)
        self._rules = functools.cache(lambda op: routes_server.rules_of(self.reading, op))
        self._walk = functools.cache(self._walk_afresh)

    def routes(
        self, query: Query, ops: tuple[Operation, ...] = ("moe", "fp4_gemm"), trapped: Container[str] | None = None
    ) -> list[Route]:
        """All routes of a query, in the order of the flag's values; `auto` may have several.

        trapped: look for traps of these values only (None: all), because they need the same route under other questions.
        Raises LabError when this SGLang has no such quantisation or no such a2a backend.
        """
        routes_server.check_a2a(self.facts, query)
        found = []
        with no_garbage_collection():
            for op in ops:
                if self._tracers(op, query.quant) is None:
                    continue
                for backend, accepted in routes_server.values(self.facts, op).items():
                    found += self.of_backend(query, op, backend, accepted, trapped is None or backend in trapped)
        return found

    def of_backend(self, query: Query, op: Operation, backend: str, accepted: Fact | None, traps: bool = True) -> list[Route]:
        """Routes of one value: one per possible resolution."""
        if lost := routes_server.lost_enum(self.facts, op):
            gate = Gate(f"{LOST_ENUM}: {lost.note}", "depends", lost.file, lost.line)
            hops = tuple(_accepted(op, backend, accepted))
            return [Route(backend, op, {}, hops, (gate,), "not found", LOST_ENUM)]
        if not self._is_member(op, backend):
            return [self._alias_route(query, op, backend, accepted)]
        resolved = routes_server.resolutions(self.facts, op, backend, query)
        return [self._route(query, op, backend, accepted, resolution, traps) for resolution in resolved]

    def _is_member(self, op: Operation, backend: str) -> bool:
        enum = self.reading.vocabulary.enums.get(routes_server.SUBJECTS[op])
        return enum is None or backend in enum.members.values()

    def _alias_route(self, query: Query, op: Operation, backend: str, accepted: Fact | None) -> Route:
        """A value of the command line that the enum lacks: rewritten by a rule, or not decided by source."""
        found = routes_server.alias(self.reading, self._rules(op), op, backend, query)
        hops = (*_accepted(op, backend, accepted), *((found[1],) if found else ()))
        fields = found[0] if found else {}
        other = fields.get(FLAG_FIELDS[op])
        if other is not None and self._is_member(op, other):
            asked = dataclasses.replace(query, a2a=fields.get("moe_a2a_backend", query.a2a))
            route = self.of_backend(asked, op, other, accepted)[-1]  # the last is the one that no model rule changes
            return dataclasses.replace(route, backend=backend, when={**route.when, **fields}, hops=(*hops, *route.hops[1:]))
        gate = Gate("depends on how the argument handling rewrites this value", "depends", hops[-1].file if hops else "", 0)
        return Route(backend, op, fields, hops, (gate,), "not found", f"depends on {fields or 'a rule that source does not show'}")

    def _tracer(self, op: Operation, quant: str) -> MoeTracer | DenseTracer | None:
        classes = self._classes(quant)
        if op == "moe":
            return MoeTracer(self.reading, classes) if classes.moe else None
        return DenseTracer(self.reading, classes) if classes.linear else None

    def _route(self, query: Query, op: Operation, backend: str, accepted: Fact | None, resolved: Resolution, traps: bool) -> Route:
        walk = self._walk(query, op, resolved.backend)
        final = "none, it raises before" if walk.refusal else routes_traps.final_of(walk)
        said = self._flashinfer_gates(query, op, resolved.backend, walk, final)
        expected = self._expected(op, backend, accepted, walk, said, final)
        hops = (*_accepted(op, backend, accepted), *resolved.hops, *walk.hops, *_kernel_hops(walk))
        asked = routes_server.open_checks(self.reading, self._rules(op), op, resolved.backend, query)
        gates = (*asked, *_alternatives(walk, final), *walk.gates, *said)
        route = Route(backend, op, resolved.when, hops, gates, final, expected)
        return dataclasses.replace(route, traps=tuple(self._traps(query, route, accepted, resolved, walk))) if traps else route

    def _traps(self, query: Query, route: Route, accepted: Fact | None, resolved: Resolution, walk: Walk) -> Iterator[str]:
        """What the flag does not say, found by asking the same of other GPUs and flags."""
        op, backend = route.op, route.backend
        yield from routes_traps.of_gates(route.gates)
        if route.expected.startswith("silently"):
            yield f"{FLAGS[op]} {backend} {route.expected.replace(f': {backend} ends', ', it ends')}"
        if op == "moe":
            yield from routes_traps.of_moe(
                self._tracers(op, query.quant), self.facts, query, backend, resolved, walk, route.expected
            )
        if backend != "auto":
            failing = functools.partial(self._fails, op, backend)
            yield from routes_traps.of_failure(op, query, backend, accepted, failing, route.expected)

    def _walk_afresh(self, query: Query, op: Operation, backend: str) -> Walk:
        """SGLang's part: argument rules, the capability that the quantisation asks for, then the layers."""
        refused = routes_server.refusal(self.reading, self._rules(op), op, backend, query) or self._too_old(query, op)
        if refused is None:
            return self._tracers(op, query.quant).trace(query, backend)
        return Walk(hops=[refused[1]], refusal=refused[0])

    def _too_old(self, query: Query, op: Operation) -> tuple[Refusal, Hop] | None:
        """The least capability of the quantisation's config, or of its scheme, which is compared at model load."""
        classes = self._classes(query.quant)
        for owner in (classes.config, classes.moe if op == "moe" else classes.linear):
            least = owner.methods.get("get_min_capability") if owner else None
            number = self.reading.evaluator(query.scenario()).returned(least, {"self": Self(owner)}) if least else None
            if isinstance(number, int) and query.number < number:
                text = f"ValueError: {query.quant} needs capability {number} at model load, this GPU has {query.number}"
                return Refusal(text, owner.file, least.line), Hop(
                    owner.file, least.line, f"{owner.name} asks for capability {number}"
                )
        return None

    def _flashinfer_gates(self, query: Query, op: Operation, backend: str, walk: Walk, final: str) -> list[Gate]:
        name = self._tracers(op, query.quant).flashinfer_name(backend) if op == "fp4_gemm" else None
        return [] if walk.refusal else routes_flashinfer.gates(self.flashinfer, final, name, query)

    def _expected(self, op: Operation, backend: str, accepted: Fact | None, walk: Walk, said: list[Gate], final: str) -> str:
        if walk.refusal:
            return f"raises: {walk.refusal.text}"
        failed = next((gate for gate in said if gate.state == "failed" and gate.refuses), None)
        if failed is not None:
            return f"raises: {failed.text}"
        if walk.left_to is not None:
            return f"depends on {walk.left_to}"
        if walk.unseen_import is not None:
            return f"depends on the import of {walk.unseen_import}: without it MoeRunner raises"
        if final == "not found":
            return "depends on code beyond what is followed: no kernel call was reached"
        if accepted is None:
            return f"raises: the command line has no value {backend}; only code can select it"
        other = routes_traps.elsewhere(backend, walk, final) if op == "moe" else None
        return f"silently goes elsewhere: {backend} ends in {other}" if other else WORKS

    def _fails(self, op: Operation, backend: str, query: Query) -> bool:
        """Whether SGLang itself surely raises for a value under another question."""
        return self._walk(query, op, backend).refusal is not None


def _accepted(op: Operation, backend: str, accepted: Fact | None) -> list[Hop]:
    return [Hop(accepted.file, accepted.line, f"the command line accepts {backend}")] if accepted else []


def _kernel_hops(walk: Walk) -> list[Hop]:
    found = []
    for kernel in walk.kernels if walk.refusal is None else ():
        when = f" when {' and '.join(kernel.guards)}" if kernel.guards else ""
        found.append(Hop(kernel.file, kernel.line, f"kernel {kernel.dotted}{when}"))
    return found


def _alternatives(walk: Walk, final: str) -> list[Gate]:
    """Other kernels of the same walk, each with the condition that leads to it."""
    found = []
    for kernel in walk.kernels if walk.refusal is None else ():
        if kernel.dotted != final:
            condition = " and ".join(kernel.guards) or "the kernel's own decision to take the shape"
            found.append(Gate(f"depends on {condition}: then {kernel.dotted}", "depends", kernel.file, kernel.line))
    return found
