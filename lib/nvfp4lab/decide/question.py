"""What is asked, and which records speak about it: a verdict holds for its own stack and GPU and for no other."""

import collections
import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nvfp4lab.kernels.flag_values import FLAG_OF
from nvfp4lab.records import Evidence, Verdict

# Modules of the compile stage that hold the kernels of a flag value. Several tiles and architectures share a beginning.
BUILT_FOR = {
    "flashinfer.fp4_gemm_cutlass": ("fp4_gemm", "flashinfer_cutlass"),
    "sglang.marlin_fp4": ("fp4_gemm", "marlin"),
    "sglang.gptq_marlin": ("fp4_gemm", "marlin"),
    "sglang.moe_wna16_marlin": ("moe", "marlin"),
}
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
    counts = collections.Counter(_key(record) for record in records if backends_of(record))
    if not counts:
        return None
    measured = {_key(record) for record in records if record.stage in MEASURED_STAGES}
    cc, sglang, flashinfer = max(counts, key=lambda key: (key[0] != "cpu", key in measured, counts[key]))
    return Question(cc, sglang, flashinfer)


def _key(record: Evidence) -> tuple[str, str | None, str | None]:
    return record.target.cc, record.stack.sglang, record.stack.flashinfer


def backends_of(record: Evidence) -> dict[str, str]:
    """The backends a record names, by op: {"moe": "flashinfer_cutlass"}, both ops for a server arm, {} for others.

    Read from the name of the kernel or of the module built where a flag value leads to it, from the subject
    ("moe:BACKEND:QUANT"), from details ("op"/"backend", or the arm's two fields) or, for an arm, from the flags in its repro
    line. What `auto` became, and whether a flag reached a layer at all, is not in one record: `attribution`.
    """
    parts = record.subject.split(":")
    if leads_here := _flag_of(record, parts):
        return dict([leads_here])
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


def _flag_of(record: Evidence, parts: Sequence[str]) -> tuple[str, str] | None:
    """The flag value that leads to a kernel, or to a module that was built."""
    if record.stage == "kernel":
        return FLAG_OF.get(case_of(record).get("backend"))
    if record.stage == "compile" and len(parts) > 1:
        return next((flag for module, flag in BUILT_FOR.items() if parts[1].startswith(module)), None)
    return None


def case_of(record: Evidence) -> Mapping[str, Any]:
    """The kernel case of a record, as JSON; {} for any other record."""
    case = record.details.get("case")
    return case if isinstance(case, Mapping) else {}


def partition(question: Question, records: Iterable[Evidence]) -> tuple[list[Evidence], list[Evidence]]:
    """(records that hold for the question, records about backends that hold for another stack or GPU)."""
    ours, others = [], []
    for record in records:
        (ours if question.covers(record) else others).append(record)
    return ours, [record for record in others if backends_of(record)]


def last_word(records: Sequence[Evidence]) -> list[Evidence]:
    """The records without those that a later judgement of the same run, or a mended lab, replaces.

    - The source was read again with the same question: a reading has one answer, and the later lab reads better.
    - A server run that was judged again from the same log: the later judgement counts.
    - A kernel case that was not run, and later was; or that another commit of the lab ran again: it was our probe that changed.

    A second run of the same arm, or of the same case by the same lab, replaces nothing: a failure seen once stays on record.
    """
    latest: dict[tuple, int] = {}
    for number, record in enumerate(records):
        latest[_judgement(number, record)] = number
    by_case: dict[str, list[Evidence]] = {}
    kept = [records[number] for number in sorted(latest.values())]
    for record in kept:
        if name := record.details.get("case_hash"):
            by_case.setdefault(name, []).append(record)
    replaced = {id(old) for runs in by_case.values() for place, old in enumerate(runs) if _replaced(old, runs[place + 1 :])}
    return [record for record in kept if id(record) not in replaced]


def _judgement(number: int, record: Evidence) -> tuple:
    if record.stage == "source":
        return (record.subject, record.target.cc, record.stack.sglang, record.stack.flashinfer, record.repro)
    same_log = record.stage == "server" and record.artefacts
    return (record.subject, record.artefacts, record.written_at) if same_log else (number,)


def _replaced(old: Evidence, later: Sequence[Evidence]) -> bool:
    ran = [record for record in later if record.verdict is not Verdict.NOT_RUN]
    return any(old.verdict is Verdict.NOT_RUN or record.stack.lab_commit != old.stack.lab_commit for record in ran)


def model_of(record: Evidence) -> str | None:
    """The model that a server arm served, where the record says."""
    arm = record.details.get("arm")
    return arm.get("model") if isinstance(arm, dict) else None
