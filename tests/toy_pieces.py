"""Pieces whose ending is known: what the executor tests run in workers of every engine."""

import gc
import os
import signal
import sys
import time
from multiprocessing.synchronize import SemLock
from pathlib import Path

from nvfp4lab.batch.piece import Needs, Piece
from nvfp4lab.records import Evidence, Ledger, Stack, Target, Verdict, WrongKind

FAKE_SERVER = Path(__file__).with_name("launch_fake_server.py")


def work(arguments, attempt: Path):
    """Sleep, note every completion in a shared journal, and write a file."""
    time.sleep(arguments.get("sleep_s", 0))
    (attempt / "number.txt").write_text(str(arguments["number"]))
    if arguments.get("journal"):
        with Path(arguments["journal"]).open("a") as journal:
            journal.write(f"{arguments['number']}\n")
    return Verdict.OK, ""


def nap(arguments, attempt: Path):
    """Sleep and say how many seconds it was."""
    started = time.perf_counter()
    time.sleep(arguments["sleep_s"])
    return Verdict.OK, f"{time.perf_counter() - started:.6f}"


def die_until(arguments, attempt: Path):
    """Be killed, by SIGKILL or what `signal` says, until the `flag` files left by earlier attempts are enough, then succeed."""
    flags = Path(arguments["flags"])
    flags.mkdir(exist_ok=True)
    if len(list(flags.iterdir())) < arguments["deaths"]:
        (flags / str(os.getpid())).touch()
        os.kill(os.getpid(), arguments.get("signal", signal.SIGKILL))
    return work(arguments, attempt)


def die_with_locks(arguments, attempt: Path):
    """Be killed holding every lock shared with other processes, as a worker may be at any moment; succeed when repeated."""
    flag = Path(arguments["flag"])
    if not flag.exists():
        flag.touch()
        for lock in [found for found in gc.get_objects() if isinstance(found, SemLock)]:
            lock.acquire(timeout=5)
        os.kill(os.getpid(), signal.SIGKILL)
    return work(arguments, attempt)


def end_itself(arguments, attempt: Path):
    """End the process with status 0."""
    os._exit(0)


def see(arguments, attempt: Path):
    """Say which GPUs it was given."""
    return Verdict.OK, os.environ.get("CUDA_VISIBLE_DEVICES", "whatever is there")


def testify(arguments, attempt: Path):
    """Leave one record of what was asked for."""
    verdict = Verdict(arguments.get("verdict", "ok"))
    reason, kind = ("", None) if verdict is Verdict.OK else ("asked for", arguments.get("kind"))
    subject = arguments.get("subject", f"toy:{arguments['number']}")
    record = Evidence("kernel", subject, Target("cpu"), Stack(), verdict, "none", reason, kind and WrongKind(kind))
    Ledger(attempt / "ledger.jsonl").append(record)
    return Verdict.OK, ""


def leave(arguments, attempt: Path):
    """Raise SystemExit, as a command-line tool does that is called as a function."""
    sys.exit(3)


def fail(arguments, attempt: Path):
    """Raise."""
    raise RuntimeError("no such luck")


def serve_and_hang(arguments, attempt: Path):
    """Start a server on record, as a notebook does, and sleep for a minute."""
    from nvfp4lab.server import processes  # here: the other pieces start without it
    from nvfp4lab.server.launch import fresh_port

    port = fresh_port()
    command = [sys.executable, "-I", "-S", str(FAKE_SERVER), str(port), "ready", str(attempt)]
    processes.start(command, os.environ, "toy", port, attempt / "server.log", attempt)
    return hang(arguments, attempt)


def hang(arguments, attempt: Path):
    """Sleep for a minute."""
    time.sleep(60)
    return Verdict.OK, ""


def toy(number, entry="work", timeout_s=None, needs=None, **arguments) -> Piece:
    """The piece that calls `entry` of this module."""
    return Piece(
        f"toy-{number}",
        f"toy_pieces:{entry}",
        {"number": number} | arguments,
        needs=needs or Needs(memory_gib=0.1),
        timeout_s=timeout_s,
    )
