"""The coordinator: executes a plan through an engine, keeps the run folder readable meanwhile, and says how it ended.

Layout of a run folder: `pieces/<hash>/` as published by the pieces; `ledger.jsonl`, `<notebook>.<params>.html|.ipynb`
and `index.html` are derived from them and rewritten whenever a piece ends, so a killed run loses nothing.
"""

import dataclasses
import enum
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from nvfp4lab import atomic
from nvfp4lab.batch import cleanup, notebooks
from nvfp4lab.batch import piece as pieces_module
from nvfp4lab.batch.executors import Executor
from nvfp4lab.batch.piece import Piece, Result
from nvfp4lab.batch.plan import Plan
from nvfp4lab.batch.progress import Progress
from nvfp4lab.kernels.controls import is_control
from nvfp4lab.records import BAD, Evidence, Ledger, Verdict
from nvfp4lab.report import index

DERIVE_EVERY_S = 2.0  # rewriting what the folder shows costs time that grows with the run: at most 2 % of it


class Exit(enum.IntEnum):
    """Exit codes of `nvfp4lab run`."""

    SOUND = 0
    FAILURES = 1
    RESUMABLE = 2
    MACHINE = 3


@dataclasses.dataclass(frozen=True)
class Summary:
    """How a run ended. bad: evidence that is wrong, crashed, hung or out of memory, but for emulations that must be wrong."""

    results: tuple[Result, ...]
    bad: tuple[Evidence, ...]
    interrupted: bool

    @property
    def exit_code(self) -> Exit:
        """A failure outranks incompleteness only when nothing is left to do."""
        if self.interrupted or any(result.verdict is Verdict.NOT_RUN for result in self.results):
            return Exit.RESUMABLE
        return Exit.SOUND if not self.bad and all(result.sound for result in self.results) else Exit.FAILURES


def run(plan: Plan, run_dir: Path, executor: Executor, retry_failed: bool = False) -> Summary:
    """Execute what `plan` still lacks in `run_dir`. Ctrl-C ends cleanly with `interrupted` set."""
    run_dir.mkdir(parents=True, exist_ok=True)
    _record_plan(plan, run_dir)
    for line in cleanup.clear_attempts(run_dir):
        print(line)
    results: dict[str, Result] = {}
    interrupted, next_derive = False, 0.0
    with Progress(len(plan.pieces), plan.name) as progress:
        try:
            for wave in plan.waves:
                for result in _wave(wave, run_dir, executor, retry_failed):
                    results[result.digest] = result
                    if time.monotonic() >= next_derive:
                        started = time.monotonic()
                        derive(plan, run_dir)
                        next_derive = time.monotonic() + max(DERIVE_EVERY_S, 50 * (time.monotonic() - started))
                    progress.step(
                        f"{result.name} {result.verdict} {result.seconds:.1f} s" + (f": {result.reason}" if result.reason else "")
                    )
        except KeyboardInterrupt:
            interrupted = True
    for line in cleanup.clear_attempts(run_dir):
        print(line)
    ordered = tuple(results.get(piece.digest) or _not_reached(piece) for piece in plan.pieces)
    derive(plan, run_dir)
    records = (record for piece in plan.pieces for record in Ledger(piece.folder(run_dir) / notebooks.LEDGER_FILE))
    bad = tuple(record for record in records if record.verdict in BAD and not is_control(record))
    return Summary(ordered, bad, interrupted)


def _wave(wave: Sequence[Piece], run_dir: Path, executor: Executor, retry_failed: bool) -> Iterator[Result]:
    """Results of one wave: the published ones first, then the rest as they finish."""
    todo = []
    for piece in wave:
        done = pieces_module.published(piece, run_dir)
        if done is not None and (done.sound or not retry_failed):
            yield done
            continue
        pieces_module.retire(piece, run_dir)
        todo.append(piece)
    yield from executor.run(todo, run_dir)


def derive(plan: Plan, run_dir: Path) -> None:
    """Rewrite what the run folder shows from the published pieces: joined ledger, pages, index.

    Pieces of an earlier plan that this one does not name (`--only`) come first: asking again for one notebook loses no other.
    """
    others = pieces_module.published_besides(plan.pieces, run_dir)
    results = [*others, *(pieces_module.published(piece, run_dir) or _not_reached(piece) for piece in plan.pieces)]
    lines = []
    for result in results:
        folder = run_dir / "pieces" / result.digest
        if not folder.exists():
            continue
        for record in Ledger(folder / notebooks.LEDGER_FILE):
            artefacts = tuple(f"pieces/{result.digest}/{path}" for path in record.artefacts)
            lines.append(dataclasses.replace(record, artefacts=artefacts).to_json() + "\n")
        for source, suffix in ((notebooks.NOTEBOOK_FILE, ".ipynb"), (notebooks.REPORT_FILE, ".html")):
            shown = run_dir / f"{result.name}{suffix}"
            if (folder / source).exists() and not _same_file(folder / source, shown):
                atomic.replace(shown, (folder / source).read_bytes())
    atomic.replace(run_dir / notebooks.LEDGER_FILE, "".join(lines).encode())
    index.write_run(run_dir, results)


def newest_run(outputs: Path, name: str) -> Path | None:
    """The latest run folder of a plan of this name under `outputs`, or None."""
    candidates = [folder for folder in outputs.glob(f"{name}-*") if (folder / "plan.json").exists()]
    return max(candidates, key=lambda folder: folder.name, default=None)


def _record_plan(plan: Plan, run_dir: Path) -> None:
    rows = [{"name": piece.name, "digest": piece.digest} for piece in plan.pieces]
    atomic.replace(run_dir / "plan.json", json.dumps({"name": plan.name, "pieces": rows}, indent=1).encode())


def _not_reached(piece: Piece) -> Result:
    return Result(piece.name, piece.digest, Verdict.NOT_RUN, "not reached yet", 0.0)


def _same_file(source: Path, copy: Path) -> bool:
    return copy.exists() and copy.stat().st_mtime_ns >= source.stat().st_mtime_ns and copy.stat().st_size == source.stat().st_size


def free_space_gib(folder: Path) -> float:
    """Free disk space where `folder` lies or will lie, in GiB."""
    existing = next(parent for parent in (folder, *folder.resolve().parents) if parent.exists())
    return shutil.disk_usage(existing).free / 2**30
