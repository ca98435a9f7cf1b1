"""From an arm to its evidence: start it, ask it what it must know, look at it again, end it.

The questions are handed in, so that the notebook decides how deep to look; what is judged here is the server's life:
whether it started, how far it came if not, whether it survived the questions, and whether it left anything behind.
"""

import dataclasses
import functools
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import requests

from nvfp4lab import stack
from nvfp4lab.errors import LabError
from nvfp4lab.records import Evidence, Number, Verdict, WrongKind
from nvfp4lab.server import arms_model, logs, together
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.arms_plan import Planned
from nvfp4lab.server.launch import Ending, Limits, Outcome, Server, fresh_port
from nvfp4lab.server.states import State


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the questions said about a server that answered. kind None: nothing wrong. void: why it says nothing about the arm."""

    kind: WrongKind | None = None
    reason: str = ""
    numbers: tuple[Number, ...] = ()
    details: Mapping = dataclasses.field(default_factory=dict)
    void: str = ""


@dataclasses.dataclass(frozen=True)
class Judged:
    """An arm after its turn; outcome and ending are None when it was not started."""

    arm: Arm
    evidence: Evidence
    outcome: Outcome | None = None
    ending: Ending | None = None


def server_of(
    arm: Arm,
    run_dir: Path | str,
    limits: Limits,
    on_state: Callable[[State, float], None] = lambda *_: None,
    gpus: Mapping[str, str] = {},
) -> Server:
    """The (not yet started) server of an arm. gpus: the environment variable that names its GPUs, see `together.gpus_of`."""
    folder = arms_model.model_folder(arm.model)
    env = {**arm.environment(), **gpus, **arm.env}
    return Server(arm.name, lambda port: arm.command(folder, port, fresh_port()), env, run_dir, limits, on_state)


def judge(
    planned: Sequence[Planned],
    run_dir: Path | str,
    limits: Limits,
    ask: Callable[[Arm, Server], Finding],
    on_state: Callable[[Arm, State, float], None] = lambda *_: None,
) -> list[Judged]:
    """Start these arms side by side, ask them at the same time, end all. Never raises for what a server does.

    `ask` is called from several threads when several arms are started. Ctrl-C and a full disk come through. In the order
    given, also for arms that are not to be started.
    """
    judged, started = {}, []
    gpus = together.gpus_of([item.arm.gpus() for item in planned])
    for item, given in zip(planned, gpus, strict=True):
        arm = item.arm
        try:
            if item.start:
                started.append((arm, server_of(arm, run_dir, limits, functools.partial(on_state, arm), given)))
            else:
                judged[arm.name] = Judged(arm, not_run(arm, item.reason))
        except LabError as error:
            judged[arm.name] = Judged(arm, not_run(arm, str(error)))
    with together.up([server for _, server in started]) as failures:
        answering = [(arm, server) for arm, server in started if arm.name not in failures]
        told = together.at_once([functools.partial(_questioned, arm, server, ask) for arm, server in answering])
        answered = {arm.name: result for (arm, _), result in zip(answering, told, strict=True)}
    for arm, server in started:
        if arm.name in answered:
            row = _answered(arm, server, *answered[arm.name], run_dir)
        else:
            row = _failed(arm, server, failures[arm.name].outcome, run_dir)
        judged[arm.name] = _beside(row, [other.name for other, _ in started if other is not arm])
    return [judged[item.arm.name] for item in planned]


def _beside(row: Judged, neighbours: Sequence[str]) -> Judged:
    """`row`, saying who ran at the same time: start times are then those of a busy machine, memory left is that of all."""
    if not neighbours:
        return row
    details = {**row.evidence.details, "side_by_side": list(neighbours)}
    return dataclasses.replace(row, evidence=dataclasses.replace(row.evidence, details=details))


@dataclasses.dataclass(frozen=True)
class _Failure:
    """Why a server that was ready has no answers: gone, or silent."""

    verdict: Verdict
    reason: str
    details: Mapping


def _questioned(arm: Arm, server: Server, ask: Callable[[Arm, Server], Finding]) -> tuple[Finding, _Failure | None]:
    """(what the questions found, how the server failed meanwhile). A broken connection counts only with a lost server."""
    finding, error = Finding(), None
    try:
        finding = ask(arm, server)
    except (OSError, ValueError, KeyError, LabError) as broken:  # no connection, no JSON, no such field, no answer
        error = broken
    if lost := server.lost():
        return finding, _Failure(*why_lost(server, f"{lost} while it was being questioned"))
    if isinstance(error, requests.Timeout):
        return finding, _Failure(*why_lost(server, f"the server lives and listens, but does not answer ({error})", Verdict.HANG))
    return (_unreadable(server, error) if error else finding), None


def _unreadable(server: Server, error: Exception) -> Finding:
    """A reply that is none. SGLang answers with an HTTP error where a log-probability is NaN; then its log says so."""
    told, what = logs.classify(server.outcome.log, "running"), f"{type(error).__name__}: {error}"
    is_nan = told.verdict is Verdict.WRONG and told.symptom_class == str(WrongKind.NAN)
    return Finding(WrongKind.NAN, f"{what}: {told.line}") if is_nan else Finding(WrongKind.GARBAGE, what)


def _answered(arm: Arm, server: Server, finding: Finding, failure: _Failure | None, run_dir: Path | str) -> Judged:
    numbers = (*_life_numbers(server.outcome, server.ending), *finding.numbers)
    details = {**_life_details(server.outcome), **finding.details}
    if not server.ending.clean:
        details["left_behind"] = dataclasses.asdict(server.ending)
    common = {"numbers": numbers, "details": details, "artefacts": _artefacts(server, run_dir)}
    if failure:
        details |= failure.details
        evidence = _evidence(arm, failure.verdict, failure.reason, **common)
    elif finding.kind is not None:
        evidence = _evidence(arm, Verdict.WRONG, finding.reason, kind=finding.kind, **common)
    elif finding.void:
        evidence = _evidence(arm, Verdict.NOT_RUN, f"answered right, but {finding.void}", **common)
    else:
        evidence = _evidence(arm, Verdict.OK, finding.reason, **common)
    return Judged(arm, evidence, server.outcome, server.ending)


def _failed(arm: Arm, server: Server, outcome: Outcome, run_dir: Path | str) -> Judged:
    verdict, reason, details = why_failed(outcome)
    evidence = _evidence(
        arm,
        verdict,
        reason,
        numbers=_life_numbers(outcome, server.ending),
        details={**_life_details(outcome), **details},
        artefacts=_artefacts(server, run_dir),
    )
    return Judged(arm, evidence, outcome, server.ending)


def why_failed(outcome: Outcome) -> tuple[Verdict, str, dict]:
    """(verdict, one sentence, details) of a start that failed: what the log says, else how the process ended.

    A log that shows no failure does not acquit a server that ended or hung.
    """
    is_hung = outcome.state is State.HUNG
    told = logs.classify(outcome.log, "timeout" if is_hung else outcome.exit_code)
    spoilt = told.verdict is Verdict.NOT_RUN and told.symptom_class != logs.UNKNOWN  # by the machine: to be started again
    return _explained(told, outcome.reason, Verdict.NOT_RUN if spoilt else Verdict.HANG if is_hung else Verdict.CRASH, spoilt)


def why_lost(server: Server, what: str, otherwise: Verdict = Verdict.CRASH) -> tuple[Verdict, str, dict]:
    """The same for a server that was ready and then failed: what the log says of it, else `otherwise`."""
    return _explained(logs.classify(server.outcome.log), what, otherwise)


def _explained(told: logs.Classification, what: str, otherwise: Verdict, spoilt: bool = False) -> tuple[Verdict, str, dict]:
    """A process that failed is never only `wrong`: what its log says of NaN is the reason."""
    verdict = told.verdict if told.verdict in (Verdict.UNSUPPORTED, Verdict.OOM, Verdict.CRASH, Verdict.HANG) else otherwise
    says_why = spoilt or told.verdict not in (Verdict.OK, Verdict.NOT_RUN)
    reason = what
    if says_why and told.line:  # a refusal is told in the server's own words; how its process then ended is an aside
        reason = f"{told.line} ({what})" if verdict is Verdict.UNSUPPORTED else f"{what}: {told.line}"
    return verdict, reason, {"classification": told.as_contract()}


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


def not_run(arm: Arm, reason: str) -> Evidence:
    """The record of an arm that was not started."""
    return _evidence(arm, Verdict.NOT_RUN, reason)


def _evidence(arm: Arm, verdict: Verdict, reason: str, **fields) -> Evidence:
    details = {"arm": arm.model_dump(exclude_defaults=True), **fields.pop("details", {})}
    repro = f"nvfp4lab run PARAMS --only 31  # arm {arm.name}: {shlex.join(['--model-path', arm.model, *arm.backend_flags()])}"
    return Evidence("server", f"arm:{arm.name}", stack.here(), stack.capture(), verdict, repro, reason, details=details, **fields)
