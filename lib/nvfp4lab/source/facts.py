"""Fact: one statement read from source, in the format of the project's answer key; and questions to many of them.

`when` says under which conditions a fact holds: `cc_major` (number or list), `cc` (interval such as ">=80,<100", majors
times ten plus minor), `cc_major_not`, `cc_major_not_in`, `a2a`, `quantization` (effective method), `quantization_flag`
(server argument), `model_arch`, `model_family`, and other names that source alone cannot decide.
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from nvfp4lab.errors import LabError


@dataclasses.dataclass(frozen=True)
class Place:
    """One line of a member, with its text."""

    file: str
    line: int
    evidence: str = ""


@dataclasses.dataclass(frozen=True)
class Fact:
    """One statement with the line that says it.

    package: "sglang" or "flashinfer". value: string, number, bool, None, or a list of those (compared as a set).
    also: further lines of the same chain. scope: enclosing class and function. note: what a reader must know besides.
    derived: joined from several places rather than read off one line.
    """

    package: str
    version: str
    subject: str
    predicate: str
    value: Any
    file: str
    line: int
    when: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    evidence: str = ""
    also: tuple[Place, ...] = ()
    scope: str = ""
    note: str = ""
    derived: bool = False

    def to_json(self) -> dict[str, Any]:
        """The answer key's object; empty fields are left out."""
        row: dict[str, Any] = {f"{self.package}_version": self.version}
        for name in ("subject", "predicate", "value", "when", "file", "line", "evidence", "scope", "note", "derived"):
            value = getattr(self, name)
            if name in ("value", "file", "line") or value:
                row[name] = dict(value) if name == "when" else value
        if self.also:
            row["also"] = [dataclasses.asdict(place) for place in self.also]
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "Fact":
        """Inverse of `to_json`; fields of the key that a fact does not have (id, match) are dropped. ValueError on others."""
        package = next((name for name in ("sglang", "flashinfer") if f"{name}_version" in row), None)
        if package is None:
            raise ValueError(f"not a fact, it names no sglang_version or flashinfer_version: {row}")
        names = {field.name for field in dataclasses.fields(cls)} - {"package", "version", "also", "when"}
        kept = {name: row[name] for name in names if row.get(name) is not None or name == "value"}
        also = tuple(Place(place["file"], place["line"], place.get("evidence", "")) for place in row.get("also") or ())
        return cls(package=package, version=row[f"{package}_version"], also=also, when=row.get("when") or {}, **kept)

    def places(self) -> tuple[Place, ...]:
        """The fact's own line, then `also`."""
        return (Place(self.file, self.line, self.evidence), *self.also)


class Facts:
    """Many facts of one or two packages, asked by subject, predicate and conditions."""

    def __init__(self, facts: Iterable[Fact]):
        self._facts = tuple(facts)

    def __iter__(self) -> Iterator[Fact]:
        return iter(self._facts)

    def __len__(self) -> int:
        return len(self._facts)

    def query(self, subject: str | None = None, predicate: str | None = None, when: Mapping[str, Any] | None = None) -> list[Fact]:
        """Facts of exactly that subject and predicate that can hold under `when` (see `holds`); None asks for any.

        In `subject`, a fact's `*` part matches every word: `moe:*:modelopt_fp4` answers for `moe:triton:modelopt_fp4`.
        """
        return [
            fact
            for fact in self._facts
            if (subject is None or _matches(fact.subject, subject))
            and (predicate is None or fact.predicate == predicate)
            and (when is None or holds(fact.when, when) is not False)
        ]


def _matches(said: str, asked: str) -> bool:
    said_parts, asked_parts = said.split(":"), asked.split(":")
    if len(said_parts) != len(asked_parts):
        return False
    return all(s in ("*", a) or (s.endswith("*") and a.startswith(s[:-1])) for s, a in zip(said_parts, asked_parts, strict=True))


def holds(when: Mapping[str, Any], question: Mapping[str, Any]) -> bool | None:
    """Whether conditions `when` are met by `question`; None where the question does not say.

    `question`: "cc" as "12.0" and any names of `when` ("a2a", "quantization", "model_arch", ...).
    """
    answers = [_condition_holds(name, value, question) for name, value in when.items()]
    if False in answers:
        return False
    return None if None in answers else True


_CC_CONDITIONS = {f"{name}{negated}" for name in ("cc", "cc_major") for negated in ("", "_not", "_not_in")}


def _condition_holds(name: str, value: Any, question: Mapping[str, Any]) -> bool | None:
    if name in _CC_CONDITIONS:
        if "cc" not in question:
            return None
        major, minor = (int(part) for part in str(question["cc"]).split("."))
        return _cc_holds(name, value, major, minor)
    if name not in question:
        return None
    asked = question[name]
    return asked in value if isinstance(value, list) else asked == value


def _cc_holds(name: str, value: Any, major: int, minor: int) -> bool | None:
    number = major if name.startswith("cc_major") else 10 * major + minor
    if name.endswith("_not"):
        return number != value
    if name.endswith("_not_in"):
        return number not in value
    if isinstance(value, list):
        return number in value
    if isinstance(value, int):
        return number == value
    compare = {">=": number.__ge__, "<=": number.__le__, ">": number.__gt__, "<": number.__lt__}
    for part in value.split(","):
        sign = part[:2] if part[:2] in compare else part[:1]
        if sign not in compare or not part[len(sign) :].isdigit():
            return None
        if not compare[sign](int(part[len(sign) :])):
            return False
    return True


def write_json(facts: Iterable[Fact], path: Path | str) -> None:
    """Write the list that the scorer reads. Raises LabError when the file cannot be written."""
    text = json.dumps([fact.to_json() for fact in facts], indent=1, ensure_ascii=False)
    try:
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise LabError(f"{path}: cannot be written: {error}") from error


def read_json(path: Path | str) -> Facts:
    """Inverse of `write_json`; also reads the answer key. Raises LabError on anything else."""
    try:
        return Facts(Fact.from_json(row) for row in json.loads(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise LabError(f"{path}: not a list of facts: {error}") from error
