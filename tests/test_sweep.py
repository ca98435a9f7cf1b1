"""A sweep loses no case, whatever the cases do to their workers, and goes on where it stopped."""

import dataclasses
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import sweep_cases
from nvfp4lab.kernels.cases import Case
from nvfp4lab.kernels.isolate_outcome import Limits, Outcome
from nvfp4lab.kernels.shapes import GemmShape
from nvfp4lab.kernels.sweep import Sweep, case_hash, finished
from nvfp4lab.records import Ledger, Stack, Target, Verdict, WrongKind

STACK = Stack(torch="2.14.1", lab_commit="abc")


def case(probe: str, seed: int, source: str = "") -> Case:
    return Case("reference", probe, GemmShape(16, 64, 128), seed=seed, source=source)


@pytest.fixture
def sweep(tmp_path) -> Sweep:
    return Sweep(
        Ledger(tmp_path / "ledger.jsonl"),
        tmp_path,
        Target("cpu", True),
        STACK,
        limits=Limits(timeout_s=50),
        workers=2,
        run=sweep_cases.end_as_told,
    )


def test_a_hundred_worker_deaths_are_a_hundred_records_and_harm_no_other_case(sweep):
    # One death of the fork server itself (seconds: it imports torch again), 99 of the other kinds, 50 sound cases between.
    kinds = [*sweep_cases.DEATHS[:5] * 20]
    kinds[-1] = "server"
    cases = [case(kind, seed) for seed, kind in enumerate(kinds)]
    for seed in range(50):
        cases.insert(3 * seed + 2, case("fine", 1000 + seed))
    cases.insert(70, case("wrong", 2000))
    list(sweep(cases))

    rows = list(sweep.ledger)
    assert Counter(row.details["case"]["seed"] for row in rows) == Counter(one.seed for one in cases), "one record each, none lost"
    assert sweep.ledger.damaged() == 0
    sound = [row for row in rows if row.verdict is Verdict.OK]
    assert len(sound) == 50
    assert all(row.number("seed").value == row.details["case"]["seed"] for row in sound), "each answer belongs to its case"
    [wrong] = [row for row in rows if row.verdict is Verdict.WRONG]  # a case's own verdict is kept as it is
    assert (wrong.kind, wrong.reason, wrong.details["first_bad_row"]) == (WrongKind.NAN, "three rows are NaN", 3)
    dead = {row.details["case"]["seed"]: row for row in rows if row.verdict not in (Verdict.OK, Verdict.WRONG)}
    assert {row.verdict for row in dead.values()} == {Verdict.CRASH}
    for seed, kind in enumerate(kinds):
        expected = {
            "segfault": "killed by SIGSEGV",
            "abort": "killed by SIGABRT",
            "exit": f"exit code {seed % 100}" if seed % 100 else "ended with exit code 0",
            "raise": f"ValueError: seed {seed}",
            "lie": "returned str where CaseResult was promised",
            "server": "took the fork server down with it",
        }[kind]
        assert dead[seed].reason.startswith(expected)
        assert f"seed {seed}\n" in dead[seed].details["isolation"]["output_tail"]
        assert (sweep.run_dir / dead[seed].artefacts[0]).read_text().startswith(f"seed {seed}\n")
        assert dead[seed].repro == case(kind, seed).repro


def test_an_interrupted_sweep_goes_on_where_it_stopped(sweep, tmp_path):
    started = tmp_path / "started"
    cases = [case("fine", 1), case("fine", 2), case("slow", 3, str(started)), case("fine", 4)]
    serial = dataclasses.replace(sweep, workers=1)

    def interrupt():
        while not started.exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(serial(serial.pending(cases)))
    assert time.monotonic() - began < serial.limits.timeout_s, "the case in flight was ended, not waited for"
    assert not Path(f"/proc/{started.read_text()}").exists()
    assert [row.details["case"]["seed"] for row in sweep.ledger] == [1, 2]
    assert [one.seed for one in serial.pending(cases)] == [3, 4]


def test_a_record_holds_for_its_stack_and_not_run_is_no_answer(sweep):
    ok, skipped = case("fine", 1), case("fine", 2)
    sweep.ledger.append(sweep.evidence(skipped, Outcome(Verdict.NOT_RUN, "no such GPU here")))
    sweep.ledger.append(sweep.evidence(ok, Outcome(Verdict.HANG, "no answer within 30 s")))
    assert sweep.pending([ok, skipped, ok]) == [skipped]
    assert set(finished(sweep.ledger)) == {case_hash(ok, STACK)}
    assert dataclasses.replace(sweep, stack=Stack(torch="2.15.0")).pending([ok, skipped]) == [ok, skipped]
    assert case_hash(ok, STACK) == case_hash(ok, dataclasses.replace(STACK, lab_commit="def"))


def test_a_sweep_that_cannot_start_workers_says_so(sweep):
    from nvfp4lab.errors import LabError

    with pytest.raises(LabError, match="no_such_package"):
        list(dataclasses.replace(sweep, preload=("no_such_package",))([case("fine", 1)]))
