"""Why a server failed, from what its log really says.

`logs_reader` goes over the log once, at constant memory, and keeps the first line of every signature
(`data/log_signatures.yaml`) and of every exception that no signature knows; progress that follows (the server got ready,
batches go on) clears what a server recovers from. Here the rest decides, by rank: the line that states a cause, then a
general kind of error, then the last words of an exception that nobody knows, class `unknown`. A log without failure is
`ok`, with a class only where the server itself gave notice (a slow path, missing scales); a log that ends before the
server was ready, without a failure, is `not_run`, and so is a start that the machine spoilt (a port was taken).

The verdict is what the log proves. The class is the kind of trouble that its decisive line belongs to.
"""

import dataclasses
import gzip
from pathlib import Path
from typing import BinaryIO, Literal

from nvfp4lab.errors import LabError
from nvfp4lab.records import Verdict
from nvfp4lab.server import logs_lines, logs_signatures
from nvfp4lab.server.logs_reader import Finding, Place, Reader, Run

UNKNOWN = "unknown"
Exit = int | Literal["timeout", "running"] | None
"""How the process ended: exit code (negative: by that signal), stopped for lack of progress, still there, or not known."""

VERDICTS = {
    "oom": Verdict.OOM,
    "hang": Verdict.HANG,
    "unsupported_error": Verdict.UNSUPPORTED,
    "nan": Verdict.WRONG,
    "garbage": Verdict.WRONG,
    "accuracy_loss": Verdict.WRONG,
}
"""Verdict of a class when its line is a failure and its signature names none; every other class is a crash."""

CRASH_BY_PHASE = {"import": "crash_at_import", "load": "crash_at_load", "capture": "crash_at_capture", "run": "crash_at_runtime"}
NEAR_LINES = 200  # an unlevelled line this close before an unknown exception may be its cause; one further away was survived
ASKED_TO_STOP = (0, -15, -2, 143, 130)


@dataclasses.dataclass(frozen=True)
class Classification:
    """The answer. line, line_number: the decisive one, colour codes off; None in an empty log. reports: ids, the closest first."""

    verdict: Verdict
    symptom_class: str
    line: str | None
    line_number: int | None
    cause: str
    advice: str
    reports: tuple[str, ...] = ()

    def as_contract(self) -> dict:
        """The object that `nvfp4lab classify --json` prints."""
        return {
            "verdict": str(self.verdict),
            "class": self.symptom_class,
            "line": self.line,
            "line_number": self.line_number,
            "cause": self.cause,
            "try": self.advice,
            "reports": list(self.reports),
        }


def classify(log: Path | str | BinaryIO, exit_state: Exit = None) -> Classification:
    """Classify a server log: a path (`.gz` too) or an open binary stream. Raises LabError when it cannot be read."""
    reader = Reader()
    try:
        if isinstance(log, (str, Path)):
            with _open(Path(log)) as stream:
                _feed(reader, stream)
        else:
            _feed(reader, log)
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise LabError(f"{log}: cannot be read: {getattr(error, 'strerror', None) or error}", exit_code=2) from error
    return conclude(reader, exit_state)


def _open(path: Path) -> BinaryIO:
    stream = path.open("rb")
    zipped = stream.read(2) == b"\x1f\x8b"
    stream.seek(0)
    return gzip.open(stream) if zipped else stream


def _feed(reader: Reader, stream: BinaryIO) -> None:
    for line in logs_lines.read(stream):
        reader.feed(line)


def conclude(reader: Reader, exit_state: Exit) -> Classification:
    """The decision over all that was read.

    The last start counts; one that says nothing yet leaves the word to the start before it.
    """
    run = reader.run
    if len(reader.runs) > 1 and not run.failed and not run.ready:
        run = reader.runs[-2]
    failure = decisive_failure(run)
    if failure:
        return _known(failure, run)
    if run.unknown:
        return _unknown(run.unknown, "An exception that no signature knows; the line is its own last word.")
    last = Place(reader.last.number, reader.last.clean()) if reader.last else None
    if reader.ends_in_traceback and run is reader.run:
        return _unknown(last, "The log ends inside a traceback; what was raised is not in it.")
    if exit_state == "timeout":
        return Classification(
            Verdict.HANG, "hang", *_at(last), "No progress until the time ran out; the log says no more.", "py-spy dump the server."
        )
    notice = _loudest_notice(run)
    failed_exit = isinstance(exit_state, int) and exit_state not in ASKED_TO_STOP
    if run.died or failed_exit or (run.error and not run.ready):
        if notice and not run.error:
            return _filled(
                Verdict.CRASH, notice, run, "The server ended without naming a cause; before that it gave notice only of this: "
            )
        return _unknown(run.error or run.consequence or last, _bare_end(exit_state))
    if notice:
        return _filled(Verdict.OK, notice, run)
    if run.ready:
        return Classification(
            Verdict.OK, UNKNOWN, *_at(run.ready), "The server got ready and nothing after it says failure.", "Nothing."
        )
    cause = (
        "The log is empty."
        if last is None
        else f"The log ends in phase {run.phase}, before the server was ready; nothing in it says failure."
    )
    return Classification(
        Verdict.NOT_RUN, UNKNOWN, *_at(last), cause, "Look at the processes: compiling kernels is silent for minutes."
    )


def decisive_failure(run: Run) -> Finding | None:
    """The finding that explains the failure, or None where none does."""
    candidates = [finding for finding in run.findings if _is_failure(finding) and not _is_noise(finding, run)]
    return min(candidates, key=lambda item: (item.signature.rank != "root", not item.literal, item.place.number), default=None)


def _is_failure(finding: Finding) -> bool:
    if finding.signature.rank == "notice" or finding.recovered:
        return False
    # Samplers and checks report wrong numbers at WARNING; a crash is never only a warning.
    return not finding.calm or finding.signature.symptom_class in ("nan", "garbage")


def _is_noise(finding: Finding, run: Run) -> bool:
    """Whether an unknown exception explains the end better than this finding does."""
    if run.unknown is None or (finding.signature.sticky and finding.signature.rank == "root"):
        return False
    if finding.signature.rank == "general":
        return run.unknown.number < finding.place.number or not finding.in_exception
    return not finding.in_exception and run.unknown.number - finding.place.number > NEAR_LINES


def _known(finding: Finding, run: Run) -> Classification:
    return _filled(finding.signature.verdict or VERDICTS.get(_class_of(finding), Verdict.CRASH), finding, run)


def _class_of(finding: Finding) -> str:
    return CRASH_BY_PHASE[finding.phase] if finding.signature.by_phase else finding.signature.symptom_class


def _loudest_notice(run: Run) -> Finding | None:
    """Of what did not stop the server: a notice by weight, else a reported line that it survived."""
    notices = [item for item in run.findings if item.signature.rank == "notice"]
    survived = [item for item in run.findings if item.literal and item.signature.rank != "notice"]
    return min(notices or survived, key=lambda item: (-item.signature.weight, item.place.number), default=None)


def _filled(verdict: Verdict, finding: Finding, run: Run, preface: str = "") -> Classification:
    signature = finding.signature
    cause = preface + signature.cause.format_map({key: value or "?" for key, value in finding.groups.items()})
    if finding.count > 1 and signature.rank == "notice":
        cause += f" {finding.count} such lines."
    reports = logs_signatures.closest_reports(signature, finding.place.line, run.arguments)
    return Classification(verdict, _class_of(finding), *_at(finding.place), cause, signature.advice, reports)


def _unknown(place: Place | None, cause: str) -> Classification:
    return Classification(Verdict.CRASH, UNKNOWN, *_at(place), cause, "Read the lines around it; `nvfp4lab` does not guess.")


def _bare_end(exit_state: Exit) -> str:
    if isinstance(exit_state, int) and exit_state < 0:
        return f"Killed by signal {-exit_state}; the log does not say why (9 is also what a host out of memory sends: see dmesg)."
    return "The server ended and the log names no cause that a signature knows."


def _at(place: Place | None) -> tuple[str | None, int | None]:
    return (place.line, place.number) if place else (None, None)
