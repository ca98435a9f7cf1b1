"""Servers side by side: all ready before anyone is asked, each failure its own, nothing left however the block is left."""

import os
import signal
import threading
import time

import pytest

from nvfp4lab import params
from nvfp4lab.records import Verdict
from nvfp4lab.server import arms_judge, launch, processes, processes_gpu, together
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.arms_judge import Finding
from nvfp4lab.server.arms_plan import Planned
from test_arms_judge import LIMITS, fakes, matrix_of  # noqa: F401
from test_launch_failures import fake, survivors
from test_load_run import Benchmark, sweep_of  # noqa: F401


def planned(**models: str) -> list[Planned]:
    return [Planned(Arm(name=name, model=model), True) for name, model in models.items()]


def test_all_live_at_once_and_each_failure_is_its_own(tmp_path):
    servers = [fake("healthy", tmp_path), fake("dies_at_start", tmp_path), fake("healthy", tmp_path)]
    for number, server in enumerate(servers):
        server.name = f"s{number}"
    with together.up(servers) as failures:
        assert list(failures) == ["s1"] and failures["s1"].outcome.exit_code == 1
        assert servers[0].lost() is None and servers[2].lost() is None
    assert [server.ending.clean for server in servers] == [True] * 3
    assert survivors(tmp_path) == [] and processes.leftovers(tmp_path) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_error_in_the_block_ends_all(tmp_path):
    with pytest.raises(ZeroDivisionError), together.up([fake("ignores_term", tmp_path), fake("healthy", tmp_path)]):
        raise ZeroDivisionError
    assert survivors(tmp_path) == []


def test_an_error_that_is_no_failed_start_comes_through_and_ends_the_others(tmp_path):
    unwritable = fake("healthy", tmp_path)
    unwritable._log = tmp_path / "no\0such" / "log"
    with pytest.raises(ValueError), together.up([fake("healthy", tmp_path), unwritable]):
        pytest.fail("the block must not be entered")
    assert survivors(tmp_path) == []


def test_memory_is_compared_when_the_last_is_gone(tmp_path, monkeypatch):
    """Each server's GPU holds 100 MiB for every process of ours that lives, and 20 MiB that nobody gives back."""
    monkeypatch.setattr(processes_gpu, "used_mib", lambda env=os.environ: (100.0 * len(survivors(tmp_path)) + lost_mib,))
    lost_mib = 0.0
    servers = [fake("healthy", tmp_path), fake("healthy", tmp_path)]
    for server in servers:
        server.limits = LIMITS.__class__(release_s=0.2, term_s=0.3, poll_s=0.02)
    with together.up(servers):
        assert processes_gpu.used_mib() == (200.0,)
        lost_mib = 20.0
    assert [server.ending.left_gpu_mib for server in servers] == [20.0, 20.0]
    assert not servers[0].ending.clean


def test_gpus_are_handed_out_in_turn(monkeypatch):
    monkeypatch.setattr(processes_gpu, "visible", lambda: [("2", None), ("3", None), ("5", None)])
    given = [env.get("CUDA_VISIBLE_DEVICES") for env in together.gpus_of([1, 2, 0, 1])]
    assert given == ["2", "3,5", None, "2"]
    assert together.gpus_of([2]) == [{}], "a server alone takes the first ones by itself"


def test_arms_beside_one_another_say_so_and_are_asked_at_the_same_time(tmp_path, fakes):  # noqa: F811
    asked, both = [], threading.Barrier(2, timeout=10)

    def ask(arm, server):
        both.wait()  # broken unless both are asked at the same time
        asked.append((arm.name, server.name))
        return Finding()

    rows = arms_judge.judge(
        [
            *planned(a="healthy", dead="dies_at_start"),
            Planned(Arm(name="no", model="healthy"), False, "moot"),
            *planned(b="healthy"),
        ],
        tmp_path,
        LIMITS,
        ask,
    )
    assert [row.arm.name for row in rows] == ["a", "dead", "no", "b"] and sorted(asked) == [("a", "a"), ("b", "b")]
    assert [row.evidence.verdict is Verdict.OK for row in rows] == [True, False, False, True]
    assert rows[0].evidence.details["side_by_side"] == ["dead", "b"] and rows[2].evidence.reason == "moot"
    alone = arms_judge.judge(planned(a="healthy"), tmp_path, LIMITS, lambda arm, server: Finding())[0]
    assert "side_by_side" not in alone.evidence.details


def test_an_interrupt_while_several_are_asked_takes_the_servers_from_the_questions(tmp_path, fakes):  # noqa: F811
    ended, both = [], threading.Barrier(2, timeout=10)

    def ask(arm, server):
        both.wait()
        if arm.name == "a":
            raise KeyboardInterrupt
        while server.lost() is None:
            time.sleep(0.05)
        ended.append(arm.name)
        return Finding()

    with pytest.raises(KeyboardInterrupt):
        arms_judge.judge(planned(a="healthy", b="healthy"), tmp_path, LIMITS, ask)
    assert processes.leftovers(tmp_path) == []
    launch.wait_until(lambda: ended == ["b"], 5)
    assert ended == ["b"]


def test_a_matrix_in_groups_has_every_arm_in_its_order(tmp_path, fakes, matrix_of):  # noqa: F811
    arms = [{"name": name, "model": "healthy", "flags": [f"--{name}"]} for name in ("a", "refused", "b", "c")]
    given = {"run_dir": str(tmp_path), "profile_decode": False, "arms": arms, "servers_at_once": 2}
    made = matrix_of(params.check(given, "test"))
    assert [row.subject for row in made.evidence] == ["arm:a", "arm:refused", "arm:b", "arm:c"]
    together_with = [row.details.get("side_by_side") for row in made.evidence]
    assert together_with == [["b"], None, ["a"], None]


def test_a_load_sweep_starts_a_group_and_measures_one_at_a_time(sweep_of, tmp_path, monkeypatch):  # noqa: F811
    sweep, started = sweep_of
    alive, run = [], Benchmark.run

    def counted(self, *given, **named):
        alive.append(len(processes.leftovers(tmp_path)))
        return run(self, *given, **named)

    monkeypatch.setattr(Benchmark, "run", counted)
    table = sweep({"a": "healthy", "dead": "dies_at_start", "b": "healthy"}, restarts=2, servers_at_once=3)
    assert started == ["a", "dead", "b", "b", "a"]
    assert alive == [0] * 2 + [2] * 8, "the ceiling is measured alone, cells with both servers up"
    assert [cell.sound for cell in table.cells] == [True, True, False, False, True, True]
    assert {record.details["servers_at_once"] for record in table.evidence()} == {3}
    alone = sweep({"a": "healthy"}, servers_at_once=1).evidence()[0]
    assert "servers_at_once" not in alone.details
