"""Whatever a server does, afterwards its processes and ports are gone, and nothing else is touched."""

import concurrent.futures
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from launch_kinds import FAKE, FAST, KINDS, ports_left, seen, survivors
from launch_kinds import server as fake
from nvfp4lab.server import processes, processes_table
from nvfp4lab.server.launch import Server, StartFailed
from nvfp4lab.server.states import State

FORCED_FAILURES = Path(__file__).parents[1] / "bench/forced_failures.py"


def test_every_kind_of_failure_leaves_nothing(tmp_path):
    """Each kind once; `bench/forced_failures.py` makes fifty of each."""
    folders = {name: tmp_path / f"{index}" for index, name in enumerate(KINDS)}
    for folder in folders.values():
        folder.mkdir()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        ended = dict(zip(KINDS, pool.map(lambda name: KINDS[name].act(KINDS[name], folders[name], ""), KINDS), strict=True))
    assert {name: said for name, said in ended.items() if not KINDS[name].is_right(said)} == {}
    assert survivors(tmp_path) == []
    assert len(seen(tmp_path, "port")) > len(KINDS) // 2, "most of them listened on something"
    assert ports_left(tmp_path) == []
    assert [name for name, folder in folders.items() if processes.leftovers(folder)] == []


def test_a_kind_that_ends_in_another_way_is_noticed(tmp_path):
    """Guard of the test above: what the lab says is compared, and so is whether it says that nothing is left."""
    kind = KINDS["killed_at_start"]
    ended = kind.act(kind, tmp_path, "")
    assert kind.is_right(ended)
    assert not KINDS["aborts"].is_right(ended) and not KINDS["healthy"].is_right(ended) and not KINDS["hangs"].is_right(ended)
    assert not kind.is_right(dataclasses.replace(ended, clean=False))


def test_the_figure_of_forced_failures_counts_a_round(tmp_path):
    done = subprocess.run([sys.executable, str(FORCED_FAILURES), "--limit-s", "12"], capture_output=True, text=True, check=False)
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["kinds"], said["surprises"]) == (len(KINDS), [])
    assert 0 < said["forced_failures"] < 50 * len(KINDS), "the limit of time holds"
    assert (said["processes_left"], said["ports_left"], said["records_left_open"]) == (0, 0, 0)
    assert done.returncode == (0 if said["repeats"] else 1), "not every kind had its turn"


def test_survivors_would_be_seen(tmp_path):
    """Guard of the test above: an escaped process that nobody ends is found by `survivors`."""
    server = fake("escapes", tmp_path).start()
    assert len(survivors(tmp_path)) == 2
    assert survivors(tmp_path.with_name(tmp_path.name[:-1])) == [], "a folder whose name begins alike is another one"
    assert ports_left(tmp_path) == [server.port]
    server.stop()
    assert survivors(tmp_path) == [] and ports_left(tmp_path) == []


def test_term_suffices_for_a_server_that_obeys(tmp_path):
    with fake("healthy", tmp_path) as obedient:
        pass
    with fake("ignores_term", tmp_path) as stubborn:
        pass
    assert not obedient.ending.killed
    assert stubborn.ending.killed


def test_an_exception_in_the_block_still_ends_the_server(tmp_path):
    with pytest.raises(ZeroDivisionError), fake("escapes", tmp_path) as server:
        raise ZeroDivisionError
    assert server.ending.clean and survivors(tmp_path) == []


def test_ctrl_c_while_starting_ends_the_server(tmp_path):
    def interrupt(state, seconds):
        if state is State.LOADING:
            raise KeyboardInterrupt

    server = Server(
        "hangs", lambda port: [sys.executable, str(FAKE), str(port), "hangs", str(tmp_path)], os.environ, tmp_path, FAST, interrupt
    )
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert server.ending.clean and survivors(tmp_path) == []


def test_a_foreign_server_on_our_port_is_no_readiness_and_is_left_alone(tmp_path):
    server = fake("hangs", tmp_path)
    foreign = subprocess.Popen([sys.executable, "-I", "-S", str(FAKE), str(server.port), "healthy"], stdout=subprocess.DEVNULL)
    try:
        while not processes_table.is_listened_to(server.port):
            time.sleep(0.01)
        with pytest.raises(StartFailed, match="in use by another process"):
            server.start()
        assert foreign.poll() is None
    finally:
        foreign.kill()
        foreign.wait()


def test_a_command_that_does_not_exist_fails_with_its_name(tmp_path):
    server = Server("nothing", lambda port: ["/no/such/interpreter"], os.environ, tmp_path, FAST)
    with pytest.raises(StartFailed, match="exit code 127"):
        server.start()
    assert "cannot start /no/such/interpreter" in server.log_text()


def test_a_log_is_never_overwritten(tmp_path):
    for _ in range(2):
        with pytest.raises(StartFailed):
            fake("dies_at_start", tmp_path).start()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["dies_at_start-2.log", "dies_at_start.log"]


def test_a_proxy_for_the_world_is_not_asked_about_our_own_server(tmp_path, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setenv("no_proxy", "example.org")
    with fake("healthy", tmp_path) as server:
        assert requests.get(server.url, timeout=5).status_code == 200
    assert os.environ["no_proxy"] == "example.org,127.0.0.1"


LAB = """
import os, sys
sys.path.insert(0, {tests!r})
from launch_kinds import server as fake
from pathlib import Path
server = fake({mode!r}, Path({run_dir!r})).start()
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("mode", ["healthy", "escapes_and_ignores_term"])
def test_after_the_lab_is_killed_the_next_start_reports_what_is_left(tmp_path, mode):
    code = LAB.format(tests=str(FAKE.parent), mode=mode, run_dir=str(tmp_path))
    lab = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert lab.stdout.readline() == "ready\n"
    lab.send_signal(signal.SIGKILL)
    lab.communicate()
    found = processes.leftovers(tmp_path)
    assert [(left.name, len(left.family())) for left in found] == [(mode, 1 if mode == "healthy" else 2)]
    assert survivors(tmp_path), "reporting must not end anything"
    assert not processes.end(found[0], term_wait_s=0.3).left
    assert processes.leftovers(tmp_path) == [] and survivors(tmp_path) == []


def test_a_killed_guard_does_not_hide_its_server(tmp_path):
    """Without the guard the marker in the environment still finds the server, and an escaped child of it."""
    server = fake("escapes_and_ignores_term", tmp_path).start()
    server._started.guard.send(signal.SIGKILL)
    server._guard.wait()
    assert server.stop().clean
    assert survivors(tmp_path) == []


def test_a_torn_record_line_is_skipped(tmp_path):
    server = fake("healthy", tmp_path).start()
    with (tmp_path / processes.RECORDS).open("a") as records:
        records.write('{"event": "launching", "mark')
    assert [left.name for left in processes.leftovers(tmp_path)] == ["healthy"]
    server.stop()


def test_a_server_that_is_long_in_dying_is_not_said_to_run(tmp_path):
    server = fake("dies_slowly", tmp_path)
    server.limits = dataclasses.replace(server.limits, kill_s=0.5)  # a process lingers for three seconds
    with server:
        while not (lost := server.lost()):
            time.sleep(0.02)
        assert lost == "the server began to end by itself and is not gone after 1 s"


def test_an_end_that_is_not_on_record_yet_is_no_sign_of_life(tmp_path, monkeypatch):
    """Between the end of a process and the guard's record lies a moment, on a busy machine a long one."""
    known_s: list[float] = []
    real = processes.Started.exit_code

    def late(started):
        code = real(started)
        if code is not None:
            known_s.append(time.monotonic())
        return code if known_s and time.monotonic() - known_s[0] > 0.3 else None

    monkeypatch.setattr(processes.Started, "exit_code", late)
    with fake("dies_slowly", tmp_path) as server:
        while not (lost := server.lost()):
            time.sleep(0.02)
        assert lost == "the server ended, exit code 6"


def test_without_a_guard_nobody_knows_the_exit_code(tmp_path):
    server = fake("healthy", tmp_path)
    server.limits = dataclasses.replace(server.limits, kill_s=0.5)
    with server:
        server._started.guard.send(signal.SIGKILL)
        server._started.first().send(signal.SIGKILL)
        while not (lost := server.lost()):
            time.sleep(0.02)
        assert lost == "the server ended, and nobody was there to take its exit code"
