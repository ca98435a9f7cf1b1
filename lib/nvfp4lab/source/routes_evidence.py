"""Routes as evidence. A reading is never `ok`: proven raises are `unsupported`, the rest is `not_run` with what source shows."""

import dataclasses
from collections.abc import Iterable, Sequence

from nvfp4lab.batch.progress import passing
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Stack, Target, Verdict
from nvfp4lab.source.routes import Router, open_router
from nvfp4lab.source.routes_query import Query, Route


def query_of(p: Params) -> Query:
    """The question that a params file or a notebook asks."""
    return Query(p.cc, p.quant, p.model_arch, p.a2a, p.tp, p.ep, p.gated, p.flag_given)


def read(p: Params) -> list[Evidence]:
    """Evidence of every route of the question in `p`. Raises LabError as `open_router` and `Router.routes`."""
    router = open_router(p.sglang, p.flashinfer)
    query = query_of(p)
    return of_routes(router.routes(query), query, router, p)


def of_routes(routes: Iterable[Route], query: Query, router: Router, p: Params) -> list[Evidence]:
    """One record per route, for the stack that was read, whatever is installed here."""
    stack = Stack(sglang=router.reading.version, flashinfer=router.flashinfer_version)
    return [_record(route, query, stack, p) for route in routes]


def over_gpus(router: Router, query: Query, capabilities: Sequence[str]) -> dict[str, list[Route]]:
    """{cc: routes}: the same question for several GPUs, progress shown. Only `auto` carries its traps."""
    shown = passing(capabilities, "reading routes per GPU")
    return {cc: router.routes(dataclasses.replace(query, cc=cc), trapped=("auto",)) for cc in shown}


def _record(route: Route, query: Query, stack: Stack, p: Params) -> Evidence:
    when = f" when {', '.join(f'{name} {value}' for name, value in route.when.items())}" if route.when else ""
    reason = route.expected if route.raises else f"read from source: {route.expected}"
    return Evidence(
        stage="source",
        subject=f"{route.op}:{route.backend}:{query.quant}",
        target=Target(cc=query.cc),
        stack=stack,
        verdict=Verdict.UNSUPPORTED if route.raises and not route.when else Verdict.NOT_RUN,
        reason=reason + when,
        repro=_repro(route, query, p),
        details=route.to_json(),
    )


def _repro(route: Route, query: Query, p: Params) -> str:
    words = ["nvfp4lab routes", f"--sglang {p.sglang}", f"--cc {query.cc}", f"--quant {query.quant}", f"--a2a {query.a2a}"]
    words += [f"--flashinfer {p.flashinfer}"] if p.flashinfer else []
    words += [f"--model-arch {query.model_arch}"] if query.model_arch else []
    words += [f"--tp {query.tp}", f"--ep {query.ep}", "--gated" if query.gated else "--no-gated"]
    words += ["--flag-given" if query.flag_given else "--flag-absent", f"--op {route.op}", f"--backend {route.backend}"]
    return " ".join(words)
