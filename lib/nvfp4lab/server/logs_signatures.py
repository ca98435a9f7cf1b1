"""Signatures of known troubles: data of `data/log_signatures.yaml`, and the public reports whose lines they are."""

import dataclasses
import functools
import json
import re
from importlib import resources
from typing import Any, Literal

import yaml

from nvfp4lab.records import Verdict

Rank = Literal["root", "general", "notice"]


@dataclasses.dataclass(frozen=True)
class Signature:
    """One way a trouble shows. Fields as the head of the data file explains them; `order` is its place there."""

    id: str
    rank: Rank
    symptom_class: str
    pattern: re.Pattern[str]
    cause: str
    advice: str
    order: int
    reports: tuple[str, ...] = ()
    weight: int = 0
    sticky: bool = False
    needs: str | None = None
    output_text: bool = False
    by_phase: bool = False
    swallows: bool = False
    verdict: Verdict | None = None


@dataclasses.dataclass(frozen=True)
class Report:
    """A public field report. literal: its line as reported; general: the same with other numbers allowed. Both None without one."""

    id: str
    symptom_class: str
    flags: str
    literal: str | None
    general: re.Pattern[str] | None


@functools.lru_cache(maxsize=1)
def load() -> tuple[Signature, ...]:
    """All signatures, in the order in which the first match of a line wins."""
    text = resources.files("nvfp4lab.server").joinpath("data/log_signatures.yaml").read_text(encoding="utf-8")
    return tuple(_signature(order, item) for order, item in enumerate(yaml.safe_load(text)))


def _signature(order: int, item: dict[str, Any]) -> Signature:
    return Signature(
        id=item["id"],
        rank=item["rank"],
        symptom_class=item["class"],
        pattern=re.compile(item["pattern"]),
        cause=item["cause"],
        advice=item["try"],
        order=order,
        verdict=Verdict(item["verdict"]) if "verdict" in item else None,
        **{name: item[name] for name in ("weight", "sticky", "needs", "output_text", "by_phase", "swallows") if name in item},
        reports=tuple(item.get("reports", ())),
    )


@functools.lru_cache(maxsize=1)
def reports() -> dict[str, Report]:
    """The field reports by id."""
    lines = resources.files("nvfp4lab").joinpath("data/field_reports.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["id"]: _report(row) for row in map(json.loads, filter(str.strip, lines))}


def _report(row: dict[str, Any]) -> Report:
    signature = row["error_signature"]
    literal = normal_quotes(signature) if signature else None
    general = re.compile(r"\d+".join(map(re.escape, re.split(r"\d+", literal)))) if literal else None
    return Report(row["id"], row["symptom_class"], row["flags"] or "", literal, general)


_QUOTES = str.maketrans({"`": "'", '"': "'", "’": "'", "‘": "'", "“": "'", "”": "'"})


def normal_quotes(text: str) -> str:
    """Patterns are written with single quotes; tools differ in which they use."""
    return text.translate(_QUOTES)


def closest_reports(signature: Signature, line: str, flags: str) -> tuple[str, ...]:
    """Ids of the reports that `line` resembles: first the same line, then the same with other numbers, then the same trouble.

    flags: text that names the backends in use (the server's arguments); it decides between equals.
    """
    text = normal_quotes(line)
    names = dict.fromkeys([*signature.reports, *(item.id for item in reports().values() if _likeness(item, text))])
    scored = [(-_likeness(reports()[name], text), -_shared_words(reports()[name].flags, flags), name) for name in names]
    return tuple(name for _, _, name in sorted(scored, key=lambda item: item[:2]))


def is_literal(line: str) -> bool:
    """Whether `line` holds a reported line, numbers aside."""
    text = normal_quotes(line)
    return any(_likeness(report, text) for report in reports().values())


def _likeness(report: Report, text: str) -> int:
    if report.literal is None:
        return 0
    return 2 if report.literal in text else int(bool(report.general.search(text)))


def _shared_words(wanted: str, present: str) -> int:
    words = {word for word in re.findall(r"[\w-]{4,}", wanted.lower()) if "_" in word or "-" in word}
    return sum(word in present.lower() for word in words)
