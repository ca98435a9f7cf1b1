"""Every way in which a server, or the lab that started it, can fail, and how the lab should see it.

`outcome(kind, folder)` makes one fail and cleans up as a user's notebook would; `survivors` and `ports_left` then look without
the code under test. Also a script, `launch_kinds.py HOW FOLDER GPU`: a lab that ends in the middle of its work.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from nvfp4lab.server import processes
from nvfp4lab.server.launch import Limits, Server, StartFailed
from nvfp4lab.server.states import State

FAKE = Path(__file__).with_name("launch_fake_server.py")
PATIENT = Limits(idle_s=30, spinning_s=30, term_s=0.3, kill_s=10, release_s=5, poll_s=0.02, health_s=5)
FAST = dataclasses.replace(PATIENT, idle_s=1.5, spinning_s=1.5, health_s=1)


@dataclasses.dataclass(frozen=True)
class Ended:
    """What the lab saw: state and reason of the server; clean: that it says itself that nothing is left."""

    state: State
    reason: str
    clean: bool


@dataclasses.dataclass(frozen=True)
class Kind:
    """mode: of the fake server. state, reason: what the lab should say (the reason begins or contains that)."""

    mode: str
    state: State
    reason: str
    act: Callable[["Kind", Path, str], Ended]

    def is_right(self, ended: Ended) -> bool:
        return ended.state is self.state and self.reason in ended.reason and ended.clean and bool(ended.reason) is bool(self.reason)


def server(mode: str, folder: Path, gpu: str = "", on_state: Callable = lambda state, seconds: None) -> Server:
    """A fake server. Only those that never get ready wait for a limit; a busy machine must not make the others hit it."""
    never_ready = KINDS[mode].state is State.HUNG if mode in KINDS else False
    flags = [] if gpu.endswith(":torch") else ["-I", "-S"]
    return Server(
        mode,
        lambda port: [sys.executable, *flags, str(FAKE), str(port), mode, str(folder), gpu],
        os.environ,
        folder,
        FAST if never_ready else PATIENT,
        on_state,
    )


def to_its_end(kind: Kind, folder: Path, gpu: str) -> Ended:
    """As a user would: start, notice its loss if it is to be lost, stop."""
    one = server(kind.mode, folder, gpu)
    try:
        with one:
            deadline = time.monotonic() + 10
            while kind.reason and not one.lost() and time.monotonic() < deadline:
                time.sleep(0.02)
            state, reason = State.READY, (one.lost() or "") if kind.reason else ""
    except StartFailed as error:
        state, reason = error.outcome.state, error.outcome.reason
    return Ended(state, reason, one.ending.clean)


def raises(kind: Kind, folder: Path, gpu: str) -> Ended:
    """The user's own code fails while the server runs."""
    one = server(kind.mode, folder, gpu)
    try:
        with one:
            raise ZeroDivisionError
    except ZeroDivisionError:
        return Ended(one.outcome.state, "", one.ending.clean)


def interrupted(kind: Kind, folder: Path, gpu: str) -> Ended:
    """Ctrl-C in the middle of the start."""

    def interrupt(state: State, seconds: float) -> None:
        if state is State.LOADING:
            raise KeyboardInterrupt

    one = server(kind.mode, folder, gpu, interrupt)
    one.limits = PATIENT  # it is interrupted before it could be found hung
    try:
        one.start()
    except KeyboardInterrupt:
        return Ended(State.FAILED, "interrupted", one.ending.clean)
    raise AssertionError("the server got ready")


def guard_killed(kind: Kind, folder: Path, gpu: str) -> Ended:
    """The process that stands between lab and server is gone: the marker in the environment still names the server."""
    one = server(kind.mode, folder, gpu).start()
    one._started.guard.send(signal.SIGKILL)
    one._guard.wait()
    return Ended(one.outcome.state, "", one.stop().clean)


def lab_ends(how: str) -> Callable[[Kind, Path, str], Ended]:
    """The lab itself is ended; by SIGKILL it can do nothing, and the next one finds what is left, reports it and ends it."""

    def act(kind: Kind, folder: Path, gpu: str) -> Ended:
        lab = subprocess.Popen(
            [sys.executable, __file__, how, kind.mode, str(folder), gpu], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if lab.stdout.readline() != "ready\n":
            raise AssertionError(f"the lab to be ended did not start its server: exit code {lab.wait()}")
        if how in ("killed", "terminated"):
            lab.send_signal(signal.SIGKILL if how == "killed" else signal.SIGTERM)
        lab.communicate()
        found = processes.leftovers(folder)
        ended = [processes.end(left, term_wait_s=0.3) for left in found]
        said = f"{len(found)} left and reported" if found else ""
        return Ended(State.READY, said, not any(one.left for one in ended))

    return act


_READY = {
    "healthy": "",
    "ignores_term": "",
    "halts": "",
    "escapes": "",
    "escapes_and_ignores_term": "",
    "escape_serves": "",
    "second_port": "",
    "many_children": "",
    "respawns": "",
    "breeds": "",
    "breeds_and_lingers": "",
    "dies_late": "the server ended, exit code 7",
    "dies_slowly": "the server ended, exit code 6",
    "child_keeps_port": "the server ended, exit code 9",
    "closes_port": "the server runs, but no longer listens",
}
_FAILED = {
    "dies_at_start": "before it was ready, exit code 1",
    "out_of_memory": "before it was ready, exit code 1",
    "killed_at_start": "killed by signal 11",
    "aborts": "killed by signal 6",
    "killed_by_the_system": "killed by signal 9",
    "worker_dies": "killed by signal 3",
    "forks_away": "before it was ready, exit code 0",
    "forks_away_scrubbed": "before it was ready, exit code 0",
}
_HUNG = {
    "hangs_importing": "while importing",
    "hangs": "while loading",
    "hangs_compiling": "while compiling",
    "hangs_capturing": "while capturing",
    "hangs_warming": "while warming",
    "never_healthy": "while loading",
    "never_answers": "while loading",
    "spins": "nothing but CPU time for 2 s while loading",
}
KINDS: dict[str, Kind] = {
    **{mode: Kind(mode, State.READY, reason, to_its_end) for mode, reason in _READY.items()},
    **{mode: Kind(mode, State.FAILED, reason, to_its_end) for mode, reason in _FAILED.items()},
    **{mode: Kind(mode, State.HUNG, reason, to_its_end) for mode, reason in _HUNG.items()},
    "lab raises": Kind("escapes", State.READY, "", raises),
    "lab interrupted": Kind("hangs", State.FAILED, "interrupted", interrupted),
    "lab exits": Kind("escapes", State.READY, "", lab_ends("exits")),
    "lab terminated": Kind("escapes_and_ignores_term", State.READY, "", lab_ends("terminated")),
    "lab killed": Kind("escapes_and_ignores_term", State.READY, "1 left and reported", lab_ends("killed")),
    "lab killed, server serves from a daemon": Kind("escape_serves", State.READY, "1 left and reported", lab_ends("killed")),
    "guard killed": Kind("escapes_and_ignores_term", State.READY, "", guard_killed),
}


def servers_of(folder: Path) -> dict[int, str]:
    """Pid -> command line of the fake servers of `folder` and below that have not ended; independent of the code under test."""
    found = {}
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or ()
        is_of_folder = any(word == str(folder) or word.startswith(f"{folder}/") for word in words)
        is_server = str(FAKE) in words and not any(word.endswith("processes_guard.py") for word in words)
        if is_of_folder and is_server and process.info["status"] != psutil.STATUS_ZOMBIE:
            found[process.pid] = " ".join(words)
    return found


def survivors(folder: Path) -> list[str]:
    """Command lines of fake servers of `folder` that are still there."""
    return list(servers_of(folder).values())


def seen(folder: Path, what: str) -> list[int]:
    """Numbers that the fake servers below `folder` noted: `port` for ports they listened on, `gpu` for MiB they held."""
    lines = [line.split() for path in folder.rglob("seen") for line in path.read_text().splitlines()]
    return [int(number) for name, number in lines if name == what]


def ports_left(folder: Path) -> list[int]:
    """Ports of fake servers of `folder` that are still listened on; not by a server of another folder: numbers come again."""
    table = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()[1:]]
    listening = {int(row[1].rpartition(":")[2], 16) for row in table if row[3] == "0A"}
    suspects = listening.intersection(seen(folder, "port"))
    if not suspects:
        return []
    others = servers_of(folder.parent).keys() - servers_of(folder).keys()
    return sorted(
        connection.laddr.port
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port in suspects and connection.pid not in others
    )


def main(how: str, mode: str, folder: str, gpu: str) -> None:
    server(mode, Path(folder), gpu).start()
    print("ready", flush=True)
    if how != "exits":  # without stopping it
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
