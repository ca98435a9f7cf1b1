"""What a run folder already knows about an arm: an interrupted matrix goes on where it stopped.

A record counts for the same arm, the same questions and the same stack; an arm that was not run is tried again. The lab's
own commit is left out, for a new plot restarts no server.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from nvfp4lab import atomic
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Stack, Verdict
from nvfp4lab.server.arms import Arm

QUESTIONS = ("canary_tokens", "profile_decode", "reference_model", "ideal_model")  # and every field named quality_*


def key_of(arm: Arm, p: Params, stack: Stack) -> str:
    """16 hex digits that name an arm, what is asked of it, and the stack."""
    asked = {name: value for name, value in p.model_dump().items() if name in QUESTIONS or name.startswith("quality_")}
    told = [arm.model_dump(), asked, dataclasses.asdict(stack) | {"lab_commit": None, "machine": None}]
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]


def finished(records: Iterable[Evidence]) -> dict[str, Evidence]:
    """Key -> the latest record, of every arm that was run."""
    rows = {record.details["key"]: record for record in records if record.stage == "server" and "key" in record.details}
    return {key: record for key, record in rows.items() if record.verdict is not Verdict.NOT_RUN}


def keep(run_dir: Path | str, key: str, told: dict) -> None:
    """Keep what an arm said (JSON) beside the ledger, whole or not at all."""
    atomic.replace(_path(run_dir, key), json.dumps(told, ensure_ascii=False))


def kept(run_dir: Path | str, key: str) -> dict | None:
    """What `keep` kept; None when the arm said nothing (it did not start)."""
    path = _path(run_dir, key)
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _path(run_dir: Path | str, key: str) -> Path:
    return Path(run_dir) / "answers" / f"{key}.json"
