"""Runs kernel cases, each isolated, and writes one evidence record per case the moment it ends.

Whatever a case does, it has a record; what has a record under the same stack is not run again, so an interrupted
sweep goes on where it stopped.
"""

import dataclasses
import hashlib
import json
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from nvfp4lab.kernels.cases import Case, CaseResult, run_case
from nvfp4lab.kernels.isolate import Isolator
from nvfp4lab.kernels.isolate_outcome import Limits, Outcome
from nvfp4lab.kernels.roofline import Peaks, with_fraction
from nvfp4lab.records import Evidence, Ledger, Number, Stack, Target, Verdict

PRELOAD = ("torch", "nvfp4lab.kernels.cases")


def case_hash(case: Case, stack: Stack) -> str:
    """Names a case under a stack: 16 hex digits. The lab's own commit is left out: a new plot repeats no kernel."""
    asked = dataclasses.asdict(stack) | {"lab_commit": None, "machine": None, "case": case.to_json()}
    return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]


def latest(ledger: Ledger) -> dict[str, Evidence]:
    """Case hash -> its latest record."""
    return {row.details["case_hash"]: row for row in ledger if row.stage == "kernel" and "case_hash" in row.details}


def finished(ledger: Ledger) -> dict[str, Evidence]:
    """The same for every case that was tried. What was not run is to be tried again."""
    return {name: row for name, row in latest(ledger).items() if row.verdict is not Verdict.NOT_RUN}


@dataclasses.dataclass(frozen=True)
class Sweep:
    """How to run cases.

    run_dir: the logs of cases go to run_dir/logs/kernels, artefact paths are relative to run_dir.
    preload, wishes: what workers have imported, see `isolate.Isolator`.
    workers: cases at a time. More than one only without a GPU: two cases on one GPU would spoil each other's times.
    run: what a worker calls with a case. peaks: of the device; with them a time gets its fraction of the roofline.
    """

    ledger: Ledger
    run_dir: Path
    target: Target
    stack: Stack
    limits: Limits = dataclasses.field(default_factory=Limits)
    workers: int = 1
    preload: Sequence[str] = PRELOAD
    wishes: Sequence[str] = ()
    run: Callable[[Case], CaseResult] = run_case
    peaks: Peaks | None = None

    def pending(self, cases: Sequence[Case]) -> list[Case]:
        """Cases without a record under this stack, each once, in order."""
        unique = {case_hash(case, self.stack): case for case in cases}
        done = finished(self.ledger)
        return [case for name, case in unique.items() if name not in done]

    def __call__(self, cases: Sequence[Case]) -> Iterator[Evidence]:
        """Run `cases`; yields each one's evidence when it is in the ledger, in the order in which they end.

        Closing the iterator or an exception such as KeyboardInterrupt ends what runs; those cases have no record.
        Raises LabError if no worker can be started.
        """
        jobs, results = queue.SimpleQueue(), queue.SimpleQueue()
        for case in cases:
            jobs.put(case)
        stop = threading.Event()
        isolators = [self._isolator(number) for number in range(min(self.workers, len(cases)))]
        threads = [threading.Thread(target=self._work, args=(one, jobs, results, stop), daemon=True) for one in isolators]
        try:
            for thread in threads:
                thread.start()
            for _ in cases:
                evidence = results.get()
                if isinstance(evidence, BaseException):
                    raise evidence
                self.ledger.append(evidence)
                yield evidence
        finally:
            stop.set()
            while any(thread.is_alive() for thread in threads):  # again and again: a case may just be starting
                for isolator in isolators:
                    isolator.interrupt()
                next(filter(threading.Thread.is_alive, threads), threads[0]).join(0.1)

    def _isolator(self, number: int) -> Isolator:
        threads = max(1, (psutil.cpu_count(logical=False) or 1) // self.workers)
        env = {"OMP_NUM_THREADS": str(threads)} if self.target.cc == "cpu" else {}
        return Isolator(self.run_dir / "logs" / "kernels" / f"worker{number}", self.preload, self.wishes, env)

    def _work(self, isolator: Isolator, jobs: queue.SimpleQueue, results: queue.SimpleQueue, stop: threading.Event) -> None:
        try:
            with isolator:
                while not stop.is_set():
                    case = jobs.get_nowait()
                    name = case_hash(case, self.stack)
                    outcome = isolator.run(self.run, case, name=name, limits=self.limits, expect=CaseResult)
                    results.put(self.evidence(case, outcome))
        except queue.Empty:
            pass
        except BaseException as error:  # handed to the thread that waits for results
            results.put(error)

    def evidence(self, case: Case, outcome: Outcome) -> Evidence:
        """The record of a case: what it found, or how it failed to tell."""
        result = outcome.value if outcome.verdict is Verdict.OK else CaseResult(outcome.verdict, outcome.reason)
        record = result.evidence(case, self.target, self.stack)
        if self.peaks is not None and "arithmetic" in record.details:
            record = with_fraction(record, self.peaks, record.details["arithmetic"])
        log = outcome.output_path
        return dataclasses.replace(
            record,
            numbers=(*record.numbers, *_isolation_numbers(outcome)),
            artefacts=(*record.artefacts, *([str(log.relative_to(self.run_dir))] if log else [])),
            details=dict(record.details) | {"case_hash": case_hash(case, self.stack), "isolation": _isolation_details(outcome)},
        )


def _isolation_numbers(outcome: Outcome) -> tuple[Number, ...]:
    found = {
        "case_wall_s": (outcome.wall_s, "s"),
        "case_compile_s": (outcome.compile_s, "s"),
        "peak_rss_bytes": (outcome.peak_rss_bytes, "B"),
    }
    return tuple(Number(name, value, unit) for name, (value, unit) in found.items() if value)


def _isolation_details(outcome: Outcome) -> Mapping[str, Any]:
    """What an engineer needs to pursue a failure; for a sound case only what is out of the ordinary."""
    names = ("exit_code", "signal", "xids", "device_ok", "left_behind", "error_types", "output_tail")
    found = {name: getattr(outcome, name) for name in names}
    return {name: value for name, value in found.items() if value not in (None, 0, "", ())}
