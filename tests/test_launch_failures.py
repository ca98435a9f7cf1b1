"""Whatever a server does, afterwards its processes and ports are gone, and nothing else is touched."""

import collections
import concurrent.futures
import dataclasses
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from nvfp4lab.server import processes, processes_table
from nvfp4lab.server.launch import Limits, Server, StartFailed
from nvfp4lab.server.states import State

FAKE = Path(__file__).with_name("launch_fake_server.py")
PATIENT = Limits(idle_s=30, spinning_s=30, term_s=0.3, kill_s=10, release_s=5, poll_s=0.02, health_s=5)
FAST = dataclasses.replace(PATIENT, idle_s=1.5, spinning_s=1.5, health_s=1)
NEVER_READY = {"hangs", "spins", "never_healthy"}  # only these wait for a limit; a busy machine must not make the others hit it


def fake(mode: str, run_dir: Path) -> Server:
    limits = FAST if mode in NEVER_READY else PATIENT
    return Server(
        mode, lambda port: [sys.executable, "-I", "-S", str(FAKE), str(port), mode, str(run_dir)], os.environ, run_dir, limits
    )


def survivors(run_dir: Path) -> list[str]:
    """Command lines of fake servers of this test that are still there; independent of the code under test."""
    lines = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [line for line in lines if str(FAKE) in line and str(run_dir) in line and "processes_guard" not in line]


def outcome_of(server: Server) -> tuple[State, str]:
    """Run it to its end as a user would: start, notice its loss, stop."""
    try:
        with server:
            deadline = time.monotonic() + 10
            while server.name in ("dies_late", "closes_port") and not server.lost() and time.monotonic() < deadline:
                time.sleep(0.02)
            return State.READY, server.lost() or ""
    except StartFailed as error:
        return error.outcome.state, error.outcome.reason


EXPECTED = {
    "healthy": (State.READY, ""),
    "ignores_term": (State.READY, ""),
    "escapes": (State.READY, ""),
    "escapes_and_ignores_term": (State.READY, ""),
    "escape_serves": (State.READY, ""),
    "dies_late": (State.READY, "the server ended by itself, exit code 7"),
    "closes_port": (State.READY, "the server runs, but no longer listens"),
    "dies_at_start": (State.FAILED, "before it was ready, exit code 1"),
    "killed_at_start": (State.FAILED, "killed by signal 11"),
    "forks_away": (State.FAILED, "before it was ready, exit code 0"),
    "forks_away_scrubbed": (State.FAILED, "before it was ready, exit code 0"),
    "hangs": (State.HUNG, "no log line, CPU time or compiler for"),
    "never_healthy": (State.HUNG, "while loading"),
    "spins": (State.HUNG, "nothing but CPU time for"),
}


def test_fifty_forced_failures_leave_nothing(tmp_path):
    """The figure of the stage: 0 processes and 0 ports left after 50 forced failures of every kind."""
    modes = (list(EXPECTED) * 4)[:50]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        servers = [fake(mode, tmp_path) for mode in modes]
        outcomes = list(pool.map(outcome_of, servers))
    for mode, (state, reason) in zip(modes, outcomes, strict=True):
        assert state is EXPECTED[mode][0] and EXPECTED[mode][1] in reason, (mode, state, reason)
    assert all(server.ending.clean for server in servers), [(s.name, s.ending) for s in servers if not s.ending.clean]
    assert survivors(tmp_path) == []
    assert not [server.port for server in servers if processes_table.is_listened_to(server.port)]
    assert processes.leftovers(tmp_path) == []
    assert collections.Counter(modes).keys() == EXPECTED.keys()


def test_survivors_would_be_seen(tmp_path):
    """Guard of the test above: an escaped process that nobody ends is found by `survivors`."""
    server = fake("escapes", tmp_path).start()
    assert len(survivors(tmp_path)) == 2
    server.stop()
    assert survivors(tmp_path) == []


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
from test_launch_failures import fake
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
