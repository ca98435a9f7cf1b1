"""From an arm to its evidence: start it, ask it what it must know, look at it again, end it.

The questions are handed in, so that the notebook decides how deep to look; what is judged here is the server's life:
whether it started, how far it came if not, whether it survived the questions, and whether it left anything behind.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from nvfp4lab import stack
from nvfp4lab.errors import LabError
from nvfp4lab.records import Evidence, Number, Verdict, WrongKind
from nvfp4lab.server.arms import Arm, Planned
from nvfp4lab.server.launch import Ending, Limits, Outcome, Server, StartFailed
from nvfp4lab.server.states import State
from nvfp4lab.source.fetch import cache_dir


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the questions said about a server that answered. kind None: nothing wrong."""

    kind: WrongKind | None = None
    reason: str = ""
    numbers: tuple[Number, ...] = ()
    details: Mapping = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Judged:
    """An arm after its turn; outcome and ending are None when it was not started."""

    arm: Arm
    evidence: Evidence
    outcome: Outcome | None = None
    ending: Ending | None = None
    log_text: str = ""


def model_folder(model: str) -> Path:
    """The checkpoint folder of an arm's `model`: a folder as it is, a fixture's name built once into the lab's cache."""
    from nvfp4lab.nvfp4 import fixtures  # torch and transformers: only when a fixture is wanted

    folder = Path(model).expanduser()
    if (folder / "config.json").exists():
        return folder
    if model not in fixtures.FIXTURES:
        known = ", ".join(fixtures.FIXTURES)
        raise LabError(f"{model}: neither a checkpoint folder (no config.json there) nor a fixture model ({known})")
    return fixtures.build(model, cache_dir() / "models" / model)


def server_of(arm: Arm, run_dir: Path | str, limits: Limits, on_state: Callable[[State, float], None] = lambda *_: None) -> Server:
    """The (not yet started) server of an arm."""
    folder = model_folder(arm.model)
    return Server(arm.name, lambda port: arm.command(folder, port), arm.environment(), run_dir, limits, on_state)


def judge(
    planned: Planned,
    run_dir: Path | str,
    limits: Limits,
    ask: Callable[[Server], Finding],
    on_state: Callable[[State, float], None] = lambda *_: None,
) -> Judged:
    """Give one arm its turn. Never raises for what a server does; Ctrl-C and a full disk come through."""
    arm = planned.arm
    if not planned.start:
        return Judged(arm, _evidence(arm, Verdict.NOT_RUN, planned.reason, repro=_repro(arm)))
    try:
        server = server_of(arm, run_dir, limits, on_state)
    except LabError as error:
        return Judged(arm, _evidence(arm, Verdict.NOT_RUN, str(error), repro=_repro(arm)))
    try:
        with server:
            finding, lost = _questioned(server, ask)
    except StartFailed as error:
        return _failed(arm, server, error.outcome, run_dir)
    return _answered(arm, server, finding, lost, run_dir)


def _questioned(server: Server, ask: Callable[[Server], Finding]) -> tuple[Finding, str | None]:
    """(what the questions found, how the server was lost meanwhile). A broken connection counts only with a lost server."""
    try:
        return ask(server), server.lost()
    except (OSError, ValueError) as error:  # requests' errors are OSErrors, a reply that is no JSON is a ValueError
        lost = server.lost()
        return Finding(WrongKind.GARBAGE, f"{type(error).__name__}: {error}"), lost


def _answered(arm: Arm, server: Server, finding: Finding, lost: str | None, run_dir: Path | str) -> Judged:
    numbers = (*_life_numbers(server.outcome, server.ending), *finding.numbers)
    details = {**_life_details(server.outcome), **finding.details}
    common = {"numbers": numbers, "details": details, "artefacts": _artefacts(server, run_dir), "repro": _repro(arm)}
    if lost:
        evidence = _evidence(arm, Verdict.CRASH, f"{lost} while it was being questioned", **common)
    elif finding.kind is not None:
        evidence = _evidence(arm, Verdict.WRONG, finding.reason, kind=finding.kind, **common)
    else:
        evidence = _evidence(arm, Verdict.OK, finding.reason, **common)
    return Judged(arm, evidence, server.outcome, server.ending, server.log_text())


def _failed(arm: Arm, server: Server, outcome: Outcome, run_dir: Path | str) -> Judged:
    verdict, reason, details = _why(outcome, server.log_text())
    evidence = _evidence(
        arm,
        verdict,
        reason,
        numbers=_life_numbers(outcome, server.ending),
        details={**_life_details(outcome), **details},
        artefacts=_artefacts(server, run_dir),
        repro=_repro(arm),
    )
    return Judged(arm, evidence, outcome, server.ending, server.log_text())


def _why(outcome: Outcome, log_text: str) -> tuple[Verdict, str, dict]:
    verdict = Verdict.HANG if outcome.state is State.HUNG else Verdict.CRASH
    return verdict, outcome.reason, {}


def _life_numbers(outcome: Outcome, ending: Ending) -> tuple[Number, ...]:
    return (
        Number("time_to_ready" if outcome.state is State.READY else "time_to_failure", outcome.seconds, "s"),
        Number("time_to_stop", ending.seconds, "s"),
        Number("left_processes", len(ending.left_pids), "1"),
        Number("left_ports", len(ending.left_ports), "1"),
        Number("left_gpu", ending.left_gpu_mib, "MiB"),
    )


def _life_details(outcome: Outcome) -> dict:
    return {"timeline": [[str(state), round(seconds, 2)] for state, seconds in outcome.timeline], "command": outcome.command}


def _artefacts(server: Server, run_dir: Path | str) -> tuple[str, ...]:
    return (os.path.relpath(server.outcome.log, run_dir),) if server.outcome else ()


def _repro(arm: Arm) -> str:
    return f"nvfp4lab run PARAMS --only 31  # arm {arm.name}: {' '.join(['--model-path', arm.model, *arm.backend_flags()])}"


def _evidence(arm: Arm, verdict: Verdict, reason: str, **fields) -> Evidence:
    return Evidence("server", f"arm:{arm.name}", stack.here(), stack.capture(), verdict, fields.pop("repro"), reason, **fields)
