"""Pieces whose ending is known: what the executor tests run in workers of every engine."""

import os
import signal
import time
from pathlib import Path

from nvfp4lab.batch.piece import Needs, Piece
from nvfp4lab.records import Verdict


def work(arguments, attempt: Path):
    """Sleep, note every completion in a shared journal, and write a file."""
    time.sleep(arguments.get("sleep_s", 0))
    (attempt / "number.txt").write_text(str(arguments["number"]))
    if arguments.get("journal"):
        with Path(arguments["journal"]).open("a") as journal:
            journal.write(f"{arguments['number']}\n")
    return Verdict.OK, ""


def die_until(arguments, attempt: Path):
    """Be killed until the `flag` files left by earlier attempts are enough, then succeed."""
    flags = Path(arguments["flags"])
    flags.mkdir(exist_ok=True)
    if len(list(flags.iterdir())) < arguments["deaths"]:
        (flags / str(os.getpid())).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return work(arguments, attempt)


def fail(arguments, attempt: Path):
    """Raise."""
    raise RuntimeError("no such luck")


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
