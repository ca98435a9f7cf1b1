"""Ends what a killed piece left behind, and sets its unfinished attempt aside.

Only servers that the attempt's own record names are touched (see `server.processes`): never a process we did not start.
"""

from pathlib import Path

from nvfp4lab.batch import piece
from nvfp4lab.server import processes


def end_servers_of(folder: Path) -> list[str]:
    """End servers recorded in `folder` that still live; returns one line about each."""
    lines = []
    for leftover in processes.leftovers(folder):
        processes.end(leftover)
        lines.append(f"ended a server left behind by a killed run: {leftover}")
    return lines


def clear_attempts(run_dir: Path) -> list[str]:
    """Clean up after attempts whose process is gone: end their servers, rename the folder to `.lost-N` (kept).

    Call it when no engine is at work on `run_dir`.
    """
    lines = []
    for attempt in piece.unfinished_attempts(run_dir):
        lines += end_servers_of(attempt)
        digest = attempt.name.split(".")[0]
        number = len(list(attempt.parent.glob(f"{digest}.lost-*")))
        attempt.rename(attempt.with_name(f"{digest}.lost-{number}"))
    return lines
