"""Runs one server in a session of its own and stays its ancestor, so that no descendant can hide.

Run as a script: `python -I -S processes_guard.py RECORDS MARKER COMMAND...`. As a "child subreaper" (prctl(2)) the
guard inherits every orphan below it, also one that forked twice and called setsid, so that "all descendants of the
guard" is all that the server ever started. It outlives a killed lab and keeps writing what became of the server into
RECORDS (JSON lines, one write each). It leaves when nothing is left below it. Standard library only: it starts in
some 20 ms and imports nothing of the lab.
"""

import ctypes
import json
import os
import signal
import sys
import time

PR_SET_CHILD_SUBREAPER = 36


def record(path: str, **values) -> None:
    """Append one JSON line by one write to an O_APPEND file: lines of several writers never mix."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        os.write(handle, (json.dumps(values | {"time_s": time.time()}) + "\n").encode())
    finally:
        os.close(handle)


def _start_ticks(pid: int) -> int:
    """Start time of `pid` in clock ticks since boot: field 22 of proc(5) stat; the name before ")" may hold anything."""
    with open(f"/proc/{pid}/stat", "rb") as stat:  # noqa: PTH123 (importing pathlib would double the start-up time)
        return int(stat.read().rpartition(b")")[2].split()[19])


def _start(command: list[str]) -> int:
    """Fork the server as leader of its own session and process group; its pid. A failed exec exits with 127."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            # A shell's background job ignores INT and QUIT and hands that on; SGLang's ranks tell of their end by QUIT.
            for number in (signal.SIGPIPE, signal.SIGINT, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            os.execvpe(command[0], command, os.environ)
        except OSError as error:
            os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
        finally:
            os._exit(127)
    return pid


def main(records: str, marker: str, command: list[str]) -> None:
    """Start, record, reap everything, record how the server itself ended, leave last."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    record(records, event="guarded", marker=marker, pid=os.getpid(), start_ticks=_start_ticks(os.getpid()))
    server = _start(command)
    record(records, event="started", marker=marker, pid=server, start_ticks=_start_ticks(server), pgid=server)
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return
        if pid == server:
            record(records, event="exited", marker=marker, pid=server, exit_code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
