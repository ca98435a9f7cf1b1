"""Public bug reports, paraphrased: what others saw, on which stack. They warn; they never prove anything about this GPU."""

import dataclasses
import functools
import importlib.resources
import json
import re

_OP_WORDS = {"moe": r"\bmoe\b|\bexperts?\b|grouped|megamoe|fused_moe", "fp4_gemm": r"mm_fp4|fp4[-_]gemm|fp4 gemm|\bdense\b"}


@dataclasses.dataclass(frozen=True)
class FieldReport:
    """One public report. sm: compute capabilities it names, without dot ("120", "120/121"), or None."""

    id: str
    source: str
    date: str
    project: str
    versions: str | None
    gpu: str | None
    sm: str | None
    model: str | None
    flags: str | None
    symptom_class: str
    symptom: str
    error_signature: str | None
    root_cause: str | None
    fix_or_workaround: str | None
    code_fact: str | None
    quote_confidence: str

    def speaks_of_cc(self, cc: str) -> bool:
        """Whether it names this compute capability (such as "12.0"), by `sm` alone."""
        named = re.findall(r"\d+", self.sm or "")
        wildcard = re.findall(r"(\d+)x", (self.sm or "").lower())
        plain = cc.replace(".", "")
        return plain in named or any(plain.startswith(family) for family in wildcard)

    def speaks_of(self, word: str) -> bool:
        """Whether flags, symptom or signature name `word` as a whole word (not the workaround: it praises what it names)."""
        texts = (self.flags, self.symptom, self.error_signature, self.code_fact)
        return any(re.search(rf"(?<![a-z0-9]){re.escape(word)}(?![a-z0-9])", text, re.IGNORECASE) for text in texts if text)

    @property
    def ops(self) -> frozenset[str]:
        """Which of "moe" and "fp4_gemm" it is about, by its words; both when it says neither."""
        text = " ".join(filter(None, (self.flags, self.symptom, self.error_signature, self.code_fact))).lower()
        named = {op for op, words in _OP_WORDS.items() if re.search(words, text)}
        return frozenset(named or _OP_WORDS)


@functools.lru_cache(maxsize=1)
def load() -> tuple[FieldReport, ...]:
    """All reports that the lab ships."""
    text = importlib.resources.files("nvfp4lab").joinpath("data/field_reports.jsonl").read_text(encoding="utf-8")
    return tuple(FieldReport(**json.loads(line)) for line in text.splitlines() if line.strip())


def about(op: str, backend: str, cc: str) -> tuple[FieldReport, ...]:
    """Reports on this op and compute capability that name `backend` (with or without its `flashinfer_` prefix)."""
    names = {backend, backend.replace("flashinfer_", "flashinfer-")}
    if backend.startswith("flashinfer_"):
        names |= {backend.removeprefix("flashinfer_"), backend.removeprefix("flashinfer_").replace("cutedsl", "cute-dsl")}
    asked = (report for report in load() if op in report.ops and report.speaks_of_cc(cc))
    return tuple(report for report in asked if any(report.speaks_of(name) for name in names))
