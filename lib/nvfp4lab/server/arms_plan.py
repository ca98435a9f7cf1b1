"""Which arms are worth a start: a start costs minutes, reading what stage 1 and the audit already know costs nothing.

Nothing is silently left out: an arm that is not started is listed with the reason, and can be started on request.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from nvfp4lab import stack
from nvfp4lab.errors import LabError
from nvfp4lab.params import Params
from nvfp4lab.records import Ledger
from nvfp4lab.server import arms_model, arms_routes, processes_gpu
from nvfp4lab.server.arms import Arm

# Fields of Arm behind the flags that an audit may call moot.
FIELDS = {
    "--fp4-gemm-backend": "fp4_gemm_backend",
    "--moe-runner-backend": "moe_runner_backend",
    "--moe-a2a-backend": "moe_a2a_backend",
    "--ep-size": "ep",
    "--speculative-algorithm NEXTN": "speculation",
}


@dataclasses.dataclass(frozen=True)
class Planned:
    """An arm and whether it is started; `reason` says why not."""

    arm: Arm
    start: bool
    reason: str = ""


def plan(
    arms: Iterable[Arm],
    gpus_here: int,
    refusals: Mapping[str, str] = {},
    moot: Mapping[str, Mapping[str, str]] = {},
    on_request: Collection[str] = (),
) -> list[Planned]:
    """Every arm in its order, with the decision.

    refusals: arm name -> what stage 1 proved to raise. moot: model -> {flag: why it touches nothing in that checkpoint};
    of arms that differ only in moot flags the first is started. on_request: names that are started all the same.
    """
    started: dict[str, str] = {}  # what an arm amounts to -> the arm that is started for it
    planned = []
    for arm in arms:
        fields = {FIELDS[flag]: why for flag, why in moot.get(arm.model, {}).items() if flag in FIELDS}
        if arm.speculation is not None and not arm.speculation.uses_mtp_layer:
            fields.pop("speculation", None)
        essence = _essence(arm, fields)
        reason = _why_not(arm, gpus_here, None if arm.name in on_request else refusals.get(arm.name))
        if reason is None and essence in started and arm.name not in on_request:
            given = [why for field, why in fields.items() if getattr(arm, field) != _default(field)]
            reason = f"the same as {started[essence]}: {'; '.join(given) or 'no flag that matters here differs'}"
        if reason is None:
            started.setdefault(essence, arm.name)
        planned.append(Planned(arm, reason is None, reason or ""))
    return planned


def _why_not(arm: Arm, gpus_here: int, refusal: str | None) -> str | None:
    if arm.gpus() > gpus_here:
        return f"needs {arm.gpus()} GPU{'s' if arm.gpus() > 1 else ''}, this machine has {gpus_here}"
    return f"reading the source proves that it raises: {refusal}" if refusal is not None else None


def _essence(arm: Arm, moot_fields: Iterable[str]) -> str:
    return arm.model_copy(update={"name": "x"} | {field: _default(field) for field in moot_fields}).model_dump_json()


def _default(field: str):
    return Arm.model_fields[field].default


def of_params(p: Params) -> list[Planned]:
    """The plan for `p` on this machine, from routes (which are added to the run's ledger) and an audit of each model."""
    ledger = Ledger(Path(p.run_dir) / "ledger.jsonl")
    known = list(ledger)
    seen = {(record.subject, record.repro) for record in known}
    fresh = [record for record in arms_routes.read(p.arms, p) if (record.subject, record.repro) not in seen]
    ledger.append(*fresh)
    refusals = arms_routes.refusals_of(p.arms, known + fresh, stack.here().cc, stack.capture().sglang)
    moot = {model: _moot(model) for model in {arm.model for arm in p.arms}}
    return plan(p.arms, len(processes_gpu.used_mib()), refusals, moot, p.start_on_request)


def _moot(model: str) -> dict[str, str]:
    """What the audit calls moot; {} where there is no checkpoint to look at (its arm says so when it is started)."""
    from nvfp4lab.nvfp4 import audit  # torch

    try:
        return audit.moot_flags(audit.summarise(arms_model.model_folder(model)))
    except LabError:
        return {}
