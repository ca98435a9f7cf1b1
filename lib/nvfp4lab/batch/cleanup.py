"""Ends what a killed piece left behind, and sets its unfinished attempt aside or publishes it as failed.

Only servers that the attempt's own record names are touched (see `server.processes`): never a process we did not start.
"""

from pathlib import Path

from nvfp4lab.batch import piece as pieces_module
from nvfp4lab.batch.piece import Piece, Result
from nvfp4lab.records import Verdict
from nvfp4lab.server import processes


def end_servers_of(folder: Path) -> list[str]:
    """End servers recorded in `folder` that still live; returns one line about each."""
    lines = []
    for leftover in processes.leftovers(folder):
        processes.end(leftover)
        lines.append(f"ended the server of arm {leftover.name} on port {leftover.port}, left behind when its notebook was stopped")
    return lines


def clear_attempts(run_dir: Path) -> list[str]:
    """Clean up after attempts whose process is gone: end their servers, rename the folder to `.lost-N` (kept).

    Call it when no engine is at work on `run_dir`.
    """
    lines = []
    for attempt in pieces_module.unfinished_attempts(run_dir):
        lines += end_servers_of(attempt)
        digest = attempt.name.split(".")[0]
        number = len(list(attempt.parent.glob(f"{digest}.lost-*")))
        attempt.rename(attempt.with_name(f"{digest}.lost-{number}"))
    return lines


def publish_failure(piece: Piece, run_dir: Path, verdict: Verdict, reason: str) -> Result:
    """Publish the newest unfinished attempt of `piece` (what it wrote is kept) as failed, its servers ended.

    Call it when the process of `piece` is gone. A result that it had published before it died counts instead.
    """
    done = pieces_module.published(piece, run_dir)
    if done is not None:
        return done
    attempts = sorted(pieces_module.unfinished_attempts(run_dir, piece), key=lambda path: path.stat().st_mtime)
    for attempt in attempts:
        end_servers_of(attempt)
    attempt = attempts[-1] if attempts else pieces_module.new_attempt(piece, run_dir)
    result = Result(piece.name, piece.digest, verdict, reason, 0.0)
    pieces_module.publish(attempt, result, piece.folder(run_dir))
    return result
