"""Each finished run of a load sweep on disk at once, so that an interrupted sweep repeats no finished start.

A run counts for the same arm, lengths, concurrency, number of requests, round and stack.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

from nvfp4lab import atomic
from nvfp4lab.params import Params
from nvfp4lab.records import Stack, Verdict, WrongKind
from nvfp4lab.server.load import LoadRun, Request
from nvfp4lab.server.load_evidence import Cell, Void
from nvfp4lab.server.load_telemetry import Reading


@dataclasses.dataclass(frozen=True)
class Store:
    """Runs of one params under one stack, in `run_dir/load/`."""

    p: Params
    stack: Stack

    def keep(self, cell: Cell, number: int) -> None:
        """Keep what round `number` added to `cell`, whole or not at all."""
        run, void = cell.runs.get(number), cell.voids.get(number)
        row = {
            "run": dataclasses.asdict(run) | {"shape": None} if run else None,
            "void": dataclasses.asdict(void) if void else None,
            "readings": [dataclasses.asdict(reading) for reading in cell.readings],
            "canary_checks": cell.canary_checks,
        }
        atomic.replace(self._path(cell, number), json.dumps(row))

    def recall(self, cell: Cell, number: int) -> bool:
        """Put a kept round into `cell`; False when there is none. A round that was not run is tried again."""
        path = self._path(cell, number)
        row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if row is None or (row["void"] and row["void"]["verdict"] == Verdict.NOT_RUN):
            return False
        if row["run"]:
            requests = tuple(Request(**request) for request in row["run"]["requests"])
            cell.runs[number] = LoadRun(
                cell.shape, cell.concurrency, row["run"]["duration_s"], requests, tuple(row["run"]["itl_s"])
            )
        if row["void"]:
            kind = row["void"]["kind"]
            cell.voids[number] = Void(Verdict(row["void"]["verdict"]), row["void"]["reason"], WrongKind(kind) if kind else None)
        cell.readings[:] = [Reading(**reading) for reading in row["readings"]]
        cell.canary_checks = row["canary_checks"]
        return True

    def _path(self, cell: Cell, number: int) -> Path:
        stack = dataclasses.asdict(self.stack) | {"lab_commit": None, "machine": None}
        told = [cell.arm.model_dump(), cell.shape.model_dump(), cell.concurrency, self.p.prompts_per_slot, number, stack]
        key = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
        return Path(self.p.run_dir) / "load" / f"{key}.json"
