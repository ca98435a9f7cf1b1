"""The sweep as a whole, with fake servers and a fake benchmark: order, voids, and going on after an interruption."""

import os
import sys
from pathlib import Path

import pytest

from nvfp4lab import params
from nvfp4lab.errors import LabError
from nvfp4lab.records import Ledger, Verdict
from nvfp4lab.server import arms_judge, arms_model, arms_plan, load_run
from nvfp4lab.server.launch import Limits, Server
from nvfp4lab.server.load import LoadRun, Request

FAKE = Path(__file__).with_name("launch_fake_server.py")
LIMITS = Limits(idle_s=30, spinning_s=30, term_s=0.3, release_s=5, poll_s=0.02, health_s=5)


class Canary:
    def check(self, base_url: str) -> None:
        return None


class Benchmark:
    """Answers at once; counts its runs; breaks off at the run that `stop_at` names."""

    runs = 0
    stop_at: int | None = None

    def __init__(self, run_dir, env):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def run(self, url, tokenizer, shape, concurrency, requests, seed):
        type(self).runs += 1
        if self.runs == self.stop_at:
            raise KeyboardInterrupt
        return LoadRun(shape, concurrency, 1.0, (Request(0.1, 0.5, shape.output_tokens),) * requests, (0.1,))


@pytest.fixture
def sweep_of(monkeypatch, tmp_path):
    """`load_run.sweep` of arms whose `model` names the behaviour of a fake server; (sweep, names of the starts made)."""
    started: list[str] = []

    def server_of(arm, run_dir, limits, on_state=lambda *_: None, gpus=None):
        started.append(arm.name)
        command = [sys.executable, "-I", "-S", str(FAKE)]
        return Server(arm.name, lambda port: [*command, str(port), arm.model], os.environ, run_dir, LIMITS, on_state)

    def folder(model: str) -> Path:
        if model == "absent":
            raise LabError("absent: no checkpoint")
        return tmp_path

    monkeypatch.setattr(Benchmark, "runs", 0)
    monkeypatch.setattr(Benchmark, "stop_at", None)
    monkeypatch.setattr(load_run, "Client", Benchmark)
    monkeypatch.setattr(load_run, "canary_for", lambda arm, p: Canary())
    monkeypatch.setattr(arms_judge, "server_of", server_of)
    monkeypatch.setattr(arms_model, "model_folder", folder)
    monkeypatch.setattr(arms_plan, "of_params", lambda p: arms_plan.plan(p.arms, 0))

    def sweep(models: dict[str, str], restarts: int = 1, servers_at_once: int = 1):
        arms = [{"name": name, "model": model, "flags": [f"--{name}"]} for name, model in models.items()]
        given = {"arms": arms, "restarts": restarts, "concurrencies": [1, 2], "profile_decode": False, "run_dir": str(tmp_path)}
        given["servers_at_once"] = servers_at_once
        return load_run.sweep(params.check(given, "test"))

    return sweep, started


def test_arms_are_started_in_turn_and_every_cell_is_measured(sweep_of, tmp_path):
    sweep, started = sweep_of
    table = sweep({"a": "healthy", "b": "healthy"}, restarts=2)
    assert started == ["a", "b", "b", "a"], "rounds must be rotated"
    assert all(sorted(cell.runs) == [0, 1] and not cell.voids for cell in table.cells) and len(table.cells) == 4
    records = list(Ledger(tmp_path / "ledger.jsonl"))
    assert [(record.stage, record.verdict) for record in records] == [("load", Verdict.OK)] * 4
    assert "beside_first_arm" in records[2].details and "beside_first_arm" not in records[0].details


def test_a_sweep_goes_on_where_it_was_broken_off(sweep_of):
    sweep, started = sweep_of
    Benchmark.stop_at = 2 + 3  # two ceilings, then the third run: arm b, first cell
    with pytest.raises(KeyboardInterrupt):
        sweep({"a": "healthy", "b": "healthy"})
    assert started == ["a", "b"]
    table = sweep({"a": "healthy", "b": "healthy"})
    assert started == ["a", "b", "b"], "the finished arm was started again"
    assert all(cell.sound for cell in table.cells)


def test_an_arm_that_fails_or_is_not_there_is_a_row_and_stops_nobody(sweep_of):
    sweep, started = sweep_of
    table = sweep({"dead": "dies_at_start", "gone": "absent", "good": "healthy"}, restarts=2)
    assert started == ["dead", "good", "good"], "a void arm is not started again"
    verdicts = {(record.subject, record.verdict) for record in table.evidence()}
    assert ("arm:good", Verdict.OK) in verdicts and ("arm:gone", Verdict.NOT_RUN) in verdicts
    assert {verdict for subject, verdict in verdicts if subject == "arm:dead"} <= {Verdict.CRASH, Verdict.UNSUPPORTED}


def test_a_server_that_dies_under_load_voids_all_its_rows_at_once(sweep_of):
    sweep, _ = sweep_of
    table = sweep({"late": "dies_late"})
    assert [record.verdict for record in table.evidence()] == [Verdict.CRASH] * 2
    assert "exit code 7 under" in table.evidence()[0].reason
    assert Benchmark.runs <= 2 + 1, "the benchmark was sent to a dead server"
