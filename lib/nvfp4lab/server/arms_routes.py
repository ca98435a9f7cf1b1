"""What stage 1 says about an arm: routes read from the very packages that would serve it, under the arm's own question.

The records go to the run's ledger like all evidence; `refusals_of` picks the arms that are proved to raise.
"""

import importlib.util
import itertools
import json
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from nvfp4lab import stack
from nvfp4lab.errors import LabError
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Verdict
from nvfp4lab.server import arms_model
from nvfp4lab.server.arms import Arm


def read(arms: Iterable[Arm], p: Params) -> list[Evidence]:
    """Route records of the arms' own flags on this machine's GPU; [] without a GPU, for FP4 routes need one.

    Reads the installed SGLang and FlashInfer (seconds). Says so, and returns what it has, when a package cannot be read.
    """
    from nvfp4lab.source import routes, routes_evidence

    cc, sglang, flashinfer = stack.here().cc, _folder("sglang"), _folder("flashinfer")
    if cc == "cpu" or sglang is None:
        return []
    values = p.model_copy(update={"sglang": str(sglang), "flashinfer": str(flashinfer) if flashinfer else None})
    found: dict[tuple[str, str], Evidence] = {}
    try:
        router = routes.open_router(sglang, flashinfer or "none")
        for arm in arms:
            query = _query(arm, cc)
            wanted = [route for route in (router.routes(query) if query else ()) if route.backend == asked(arm)[route.op]]
            records = routes_evidence.of_routes(wanted, query, router, values) if wanted else []
            found |= {(record.subject, record.repro): record for record in records}
    except LabError as error:
        print(f"routes of the installed packages cannot be read, arms are started without: {error}")
    return list(found.values())


def asked(arm: Arm) -> Mapping[str, str]:
    """Operation -> value of the arm's flag."""
    return {"moe": arm.moe_runner_backend or "auto", "fp4_gemm": arm.fp4_gemm_backend or "auto"}


def refusals_of(arms: Iterable[Arm], records: Iterable[Evidence], cc: str, sglang: str | None) -> dict[str, str]:
    """Arm name -> reason, from the route records of exactly this GPU generation and this SGLang.

    A record counts only when it was asked under the same flags as the arm (parallel sizes, all-to-all, quantisation).
    """
    raising = [record for record in records if record.stage == "source" and record.verdict is Verdict.UNSUPPORTED]
    proved = [record for record in raising if (record.target.cc, record.stack.sglang) == (cc, sglang)]
    found = {}
    for arm in arms:
        reason = next((record.reason for record in proved if is_about(record, arm)), None)
        if reason is not None:
            found[arm.name] = reason
    return found


def is_about(record: Evidence, arm: Arm) -> bool:
    """Whether a route record answers the arm's own question: the same flag value under the same sizes and flags."""
    op, backend, *_ = (*record.subject.split(":"), "")
    if asked(arm).get(op) != backend:
        return False
    asked_words = shlex.split(record.repro)  # the very question, as a command line
    wanted = {"--tp": str(arm.tp), "--ep": str(arm.ep), "--a2a": arm.moe_a2a_backend or "none"}
    other = "--flag-absent" if arm.quantization is not None else "--flag-given"
    given = dict(itertools.pairwise(asked_words))
    return other not in asked_words and all(given.get(flag, value) == value for flag, value in wanted.items())


def _query(arm: Arm, cc: str):
    """The arm's question; None when its checkpoint holds no FP4 layer or cannot be looked at."""
    from nvfp4lab.nvfp4 import audit  # torch
    from nvfp4lab.source.routes_query import Query

    try:
        folder = arms_model.model_folder(arm.model)
        summary = audit.summarise(folder)
    except LabError:
        return None
    if not any(summary.fp4.values()):
        return None
    quant = arm.quantization or "modelopt_fp4"
    a2a, given = arm.moe_a2a_backend or "none", arm.quantization is not None
    return Query(cc, quant, _architecture(folder), a2a, arm.tp, arm.ep, gated=True, flag_given=given)


def _architecture(folder: Path) -> str | None:
    return next(iter(json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ()), None)


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None
