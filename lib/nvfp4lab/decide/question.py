"""What is asked, and which records speak about it: a verdict holds for its own stack and GPU and for no other."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Sequence

from nvfp4lab.records import Evidence

OPS = {"moe": "--moe-runner-backend", "fp4_gemm": "--fp4-gemm-backend"}
MEASURED_STAGES = frozenset({"kernel", "server", "load"})


@dataclasses.dataclass(frozen=True)
class Question:
    """cc, sglang, flashinfer: what the decision is for; flashinfer None: whatever goes with that SGLang.

    model: what stands behind --model-path. quantization_flag: value of --quantization, None where it is not given.
    """

    cc: str
    sglang: str | None
    flashinfer: str | None
    model: str = "MODEL"
    tp: int = 1
    quantization_flag: str | None = None

    def covers(self, record: Evidence) -> bool:
        """Whether `record` holds for this stack and GPU. Unknown versions on either side do not disagree."""
        same_sglang = record.stack.sglang is None or self.sglang is None or record.stack.sglang == self.sglang
        same_flashinfer = record.stack.flashinfer is None or self.flashinfer is None or record.stack.flashinfer == self.flashinfer
        return record.target.cc == self.cc and same_sglang and same_flashinfer


def asked_by(records: Sequence[Evidence]) -> Question | None:
    """The question most of the records are about: measured ones count first, a real GPU before the CPU."""
    counts = collections.Counter(
        (record.target.cc, record.stack.sglang, record.stack.flashinfer) for record in records if _speaks(record)
    )
    if not counts:
        return None
    measured = {_key(record) for record in records if record.stage in MEASURED_STAGES}
    cc, sglang, flashinfer = max(counts, key=lambda key: (key[0] != "cpu", key in measured, counts[key]))
    return Question(cc, sglang, flashinfer)


def _key(record: Evidence) -> tuple[str, str | None, str | None]:
    return record.target.cc, record.stack.sglang, record.stack.flashinfer


def _speaks(record: Evidence) -> bool:
    return bool(backends_of(record))


def backends_of(record: Evidence) -> dict[str, str]:
    """The backends a record is about, by op: {"moe": "flashinfer_cutlass"}, both ops for a server arm, {} for others.

    Read from the subject ("moe:BACKEND:QUANT"), from details ("op"/"backend", or the arm's two fields) or, for an arm,
    from the flags in its repro line.
    """
    parts = record.subject.split(":")
    if parts[0] in OPS and len(parts) > 1 and parts[1] not in ("", "*"):
        return {} if "." in parts[1] else {parts[0]: parts[1]}  # "sglang.moe_wna16_marlin_gemm" is a kernel, no flag value
    details = record.details
    if details.get("op") in OPS and details.get("backend"):
        return {details["op"]: details["backend"]}
    arm = details.get("arm") if isinstance(details.get("arm"), dict) else details
    found = {op: arm[key] for op, key in (("moe", "moe_runner_backend"), ("fp4_gemm", "fp4_gemm_backend")) if arm.get(key)}
    if found or record.stage not in ("server", "load"):
        return found
    flags = {op: re.search(rf"{flag}[ =](\S+)", record.repro) for op, flag in OPS.items()}
    return {op: match[1] for op, match in flags.items() if match}


def partition(question: Question, records: Iterable[Evidence]) -> tuple[list[Evidence], list[Evidence]]:
    """(records that hold for the question, records about backends that hold for another stack or GPU)."""
    ours, others = [], []
    for record in records:
        (ours if question.covers(record) else others).append(record)
    return ours, [record for record in others if backends_of(record)]


def last_word(records: Iterable[Evidence]) -> list[Evidence]:
    """The records without those of server runs that were judged again from the same log: a later judgement replaces them.

    A new run of the same arm replaces nothing: a failure that was seen once stays on record.
    """
    latest: dict[tuple, Evidence] = {}
    for number, record in enumerate(records):
        same_log = record.stage == "server" and record.artefacts
        latest[(record.subject, record.artefacts, record.written_at) if same_log else (number,)] = record
    return list(latest.values())


def model_of(record: Evidence) -> str | None:
    """The model that a server arm served, where the record says."""
    arm = record.details.get("arm")
    return arm.get("model") if isinstance(arm, dict) else None
