"""A piece: the unit that is executed, retried, resumed and counted. One piece, one content hash, one result.

A piece names a function and plain-data arguments, so that a local process, a Ray task and a Slurm job can all execute
it. It works in an attempt folder of its own and publishes it by one rename to `pieces/<hash>`: whatever an engine
repeats, there is at most one result, and a half-written one is never taken for whole.
"""

import contextlib
import dataclasses
import errno
import fcntl
import functools
import hashlib
import importlib
import io
import json
import os
import secrets
import time
import traceback
import zipfile
from collections.abc import Collection, Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any

from nvfp4lab.errors import LabError
from nvfp4lab.records import Verdict
from nvfp4lab.report.redact import redact, redact_files

RESULT_FILE = "result.json"


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a host must offer. cc: capability a GPU must have, None for any. memory_gib: host memory."""

    gpus: int = 0
    cc: str | None = None
    memory_gib: float = 1.0


@dataclasses.dataclass(frozen=True)
class Piece:
    """One unit of work.

    entry: "module:function", called as `function(arguments, attempt_dir) -> (Verdict, reason)`.
    arguments: plain data, the whole input of the piece.
    inputs_digest: hash of everything else the result depends on (notebook, library, stack).
    timeout_s: limit of the whole piece; None: no limit.
    """

    name: str
    entry: str
    arguments: Mapping[str, Any]
    inputs_digest: str = ""
    needs: Needs = Needs()
    timeout_s: float | None = None

    @functools.cached_property
    def digest(self) -> str:
        """Content hash, 16 hex digits: equal inputs, equal digest."""
        content = json.dumps([self.name, self.entry, self.arguments, self.inputs_digest], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def folder(self, run_dir: Path) -> Path:
        """Where the published result lies."""
        return run_dir / "pieces" / self.digest


@dataclasses.dataclass(frozen=True)
class Result:
    """Outcome of one piece. verdict NOT_RUN: no attempt came to an end (interrupted, or no host could take it)."""

    name: str
    digest: str
    verdict: Verdict
    reason: str
    seconds: float

    @property
    def sound(self) -> bool:
        """Whether the piece did what it was asked to do."""
        return self.verdict is Verdict.OK


def published(piece: Piece, run_dir: Path) -> Result | None:
    """The result of an earlier complete attempt, or None."""
    return _result_in(piece.folder(run_dir))


def published_besides(pieces: Collection[Piece], run_dir: Path) -> list[Result]:
    """Results in `run_dir` of pieces of other names than these, by name: of several of one name the last."""
    names, own = {piece.name for piece in pieces}, {piece.digest for piece in pieces}
    others = (folder for folder in (run_dir / "pieces").glob("*") if folder.name not in own)
    folders = [folder for folder in others if "." not in folder.name]  # no attempt, none retired
    found = sorted(((folder.stat().st_mtime_ns, result) for folder in folders if (result := _result_in(folder))), key=itemgetter(0))
    latest = {result.name: result for _, result in found if result.name not in names}
    return [latest[name] for name in sorted(latest)]


def _result_in(folder: Path) -> Result | None:
    try:
        row = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Result(**row | {"verdict": Verdict(row["verdict"])})


def execute(piece: Piece, run_dir: Path) -> Result:
    """Execute `piece` here unless its result is already published, and publish the result.

    Safe to call in two processes at once: a lock lets one attempt at a time work on a piece, the later finds the result.
    Raises OSError when the machine cannot write (no space); whatever the piece itself does becomes the result.
    """
    with _alone(piece, run_dir):
        done = published(piece, run_dir)
        if done is not None:
            return done
        attempt = new_attempt(piece, run_dir)
        result = _attempt(piece, attempt)
        if result.verdict is Verdict.NOT_RUN:  # stopped from outside: the attempt stays unfinished, and is set aside later
            redact_files(attempt)
        else:
            publish(attempt, result, piece.folder(run_dir))
        return result


@contextlib.contextmanager
def _alone(piece: Piece, run_dir: Path) -> Iterator[None]:
    """One process at a time for each piece: a lock on one byte of one file, released when the process dies, however it dies."""
    path = run_dir / "pieces" / ".locks"
    try:
        locks = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        locks = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.lockf(locks, fcntl.LOCK_EX, 1, int(piece.digest, 16) >> 2)
        yield
    finally:
        os.close(locks)


def new_attempt(piece: Piece, run_dir: Path) -> Path:
    """An empty folder for one attempt at `piece`, whose name no other attempt has."""
    attempt = run_dir / "pieces" / f"{piece.digest}.attempt-{secrets.token_hex(4)}"
    attempt.mkdir(mode=0o700)
    return attempt


def publish(attempt: Path, result: Result, folder: Path) -> None:
    """Make `attempt` the piece's result: redacted, with `result` in it, renamed to `folder`. Raises OSError if there is one."""
    redact_files(attempt)  # other programs' logs lie here too
    (attempt / RESULT_FILE).write_text(json.dumps(vars(result)), encoding="utf-8")
    attempt.rename(folder)


def retire(piece: Piece, run_dir: Path) -> None:
    """Set a published result aside (kept, renamed) so that the piece runs again."""
    folder = piece.folder(run_dir)
    if folder.exists():
        number = len(list(folder.parent.glob(f"{folder.name}.retired-*")))
        folder.rename(folder.with_name(f"{folder.name}.retired-{number}"))


def unfinished_attempts(run_dir: Path, piece: Piece | None = None) -> list[Path]:
    """Attempt folders, of `piece` or of all, that never published: their process was killed, or is still at work."""
    return sorted((run_dir / "pieces").glob(f"{piece.digest if piece else '*'}.attempt-*"))


def _attempt(piece: Piece, attempt: Path) -> Result:
    started = time.monotonic()
    module, _, function = piece.entry.partition(":")
    try:
        verdict, reason = getattr(importlib.import_module(module), function)(piece.arguments, attempt)
    except LabError as error:
        verdict, reason = Verdict.CRASH, str(error)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise  # the machine's fault, not the piece's: nothing is published
        verdict, reason = Verdict.CRASH, f"{type(error).__name__}: {error}"
    except (Exception, SystemExit) as error:  # the boundary: a piece may raise anything, and the batch goes on
        verdict, reason = Verdict.CRASH, f"{type(error).__name__}: {error}"
        (attempt / "traceback.txt").write_text(redact(traceback.format_exc()), encoding="utf-8")
    return Result(piece.name, piece.digest, verdict, redact(reason) if reason else "", round(time.monotonic() - started, 3))


def pack(folder: Path) -> bytes:
    """A published piece as zip bytes, for engines whose hosts share no storage."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and not path.is_symlink():
                archive.write(path, path.relative_to(folder))
    return content.getvalue()
