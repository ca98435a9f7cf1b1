"""SIGTERM to the lab ends its servers, then the lab; nothing else about the signal changes."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from launch_kinds import FAKE, survivors
from launch_kinds import server as fake
from nvfp4lab.server import processes, processes_term
from nvfp4lab.server.launch import StartFailed

HEAD = """
import os, sys, time
sys.path.insert(0, {tests!r})
from launch_kinds import server as fake
from pathlib import Path
run_dir = Path({run_dir!r})
"""
WITH_BLOCK = """
with fake({mode!r}, run_dir):
    print("ready", flush=True)
    time.sleep(60)
"""
TWO_OPEN = """
first, second = fake({mode!r}, run_dir).start(), fake("healthy", run_dir).start()
print("ready", flush=True)
time.sleep(60)
"""
STARTING = """
from nvfp4lab.server.states import State
server = fake("hangs", run_dir)
server._on_state = lambda state, seconds: state is State.LOADING and print("ready", flush=True)
server.start()
"""
TOGETHER = """
from nvfp4lab.server import together
with together.up([fake({mode!r}, run_dir), fake("healthy", run_dir)]):
    print("ready", flush=True)
    time.sleep(60)
"""
STARTING_TOGETHER = """
from nvfp4lab.server import together
from nvfp4lab.server.states import State
hanging = [fake("hangs", run_dir), fake("hangs", run_dir)]
hanging[1]._on_state = lambda state, seconds: state is State.LOADING and print("ready", flush=True)
with together.up(hanging):
    pass
"""
CELLS = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell()
shell.user_ns["server"] = fake({mode!r}, run_dir).start()
shell.run_cell("print('ready', flush=True); import time; time.sleep(60)")
os._exit(7)  # the kernel lives on, as ipykernel does
"""


def lab(body: str, run_dir, mode: str) -> subprocess.Popen:
    code = (HEAD + body).format(tests=str(FAKE.parent), mode=mode, run_dir=str(run_dir))
    started = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "ready\n"
    return started


@pytest.mark.parametrize(
    "body",
    [WITH_BLOCK, TWO_OPEN, STARTING, TOGETHER, STARTING_TOGETHER],
    ids=["with", "two_open", "starting", "together", "starting_together"],
)
def test_term_to_the_lab_ends_its_servers(tmp_path, body):
    process = lab(body, tmp_path, "escapes_and_ignores_term")
    assert survivors(tmp_path), "the test needs a server to begin with"
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 128 + signal.SIGTERM
    assert survivors(tmp_path) == [] and processes.leftovers(tmp_path) == []


def test_a_kernel_that_catches_the_exit_keeps_no_server(tmp_path):
    """IPython catches SystemExit: the server of an earlier cell must be gone although the kernel is not."""
    process = lab(CELLS, tmp_path, "healthy")
    process.terminate()
    process.communicate(timeout=20)
    assert process.returncode == 7
    assert survivors(tmp_path) == []


def test_the_default_is_back_after_the_last_server(tmp_path):
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    with fake("healthy", tmp_path), fake("healthy", tmp_path) as second:
        second.stop()
        assert callable(signal.getsignal(signal.SIGTERM))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_program_with_its_own_handler_keeps_it(tmp_path):
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with fake("healthy", tmp_path):
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_server_of_another_thread_leaves_the_signal_alone(tmp_path):
    seen = []

    def serve():
        with fake("healthy", tmp_path):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=serve)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


def test_a_fork_of_the_lab_dies_alone(tmp_path):
    """A worker forked from the lab is told to end: the lab's servers are not its own."""
    with fake("healthy", tmp_path) as server:
        reading, writing = os.pipe()
        if (child := os.fork()) == 0:
            os.write(writing, b"x")  # a signal in the middle of the fork is lost by Python
            time.sleep(10)
            os._exit(0)
        os.read(reading, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert server.lost() is None


def test_a_signal_in_the_middle_of_a_start_waits_for_the_pid():
    stopped = []

    class Opened:
        def stop(self):
            stopped.append("stopped")

    opened = Opened()
    processes_term.add(opened)
    try:
        with pytest.raises(SystemExit), processes_term.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopped == []
        assert stopped == ["stopped"]
    finally:
        processes_term.remove(opened)


def test_a_lab_in_the_background_of_a_shell_hands_no_ignored_signal_on(tmp_path):
    """`nvfp4lab run PARAMS &` in a script ignores INT and QUIT; a server that did too would not hear of a dead rank."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGQUIT)}
    try:
        with pytest.raises(StartFailed, match="killed by signal 3"):
            fake("worker_dies", tmp_path).start()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
