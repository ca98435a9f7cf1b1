"""What changed between two runs: verdicts, numbers beyond their intervals, and the versions that explain it."""

import dataclasses
from collections.abc import Iterable, Sequence

from nvfp4lab.records import Evidence, Number, Stack, Verdict

Key = tuple[str, str, str]  # stage, subject with what sets its records apart, compute capability


@dataclasses.dataclass(frozen=True)
class Change:
    """One subject that differs. what: "verdict", a number's name, "gone" or "new".

    explained_by: the versions that differ between the two records themselves; () for a change that no version explains.
    """

    stage: str
    subject: str
    cc: str
    what: str
    before: str
    after: str
    explained_by: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class RunDiff:
    """changes: by subject. versions: name -> (before, after) of every stack field that differs."""

    changes: tuple[Change, ...]
    versions: dict[str, tuple[str | None, str | None]]


def compare(before: Sequence[Evidence], after: Sequence[Evidence]) -> RunDiff:
    """Join two ledgers by stage, subject and capability; of several records about the same thing the last counts."""
    old, new = _by_subject(before), _by_subject(after)
    changes: list[Change] = []
    for key in sorted(old.keys() | new.keys()):
        changes += _changes(key, old.get(key), new.get(key))
    return RunDiff(tuple(changes), _versions(before, after))


def differ(one: Number, other: Number) -> bool:
    """Whether two numbers differ beyond their intervals; a number without one is not judged."""
    if None in (one.low, one.high, other.low, other.high):
        return False
    return one.high < other.low or other.high < one.low


def _by_subject(records: Iterable[Evidence]) -> dict[Key, Evidence]:
    return {(record.stage, record.subject + _apart(record), record.target.cc): record for record in records}


def _apart(record: Evidence) -> str:
    """What tells records of one subject apart: the load of a server arm, the condition of a route, seed and timing of a case."""
    details = record.details
    told = []
    if details.get("concurrency") is not None:
        told = [f"concurrency {details['concurrency']}", f"{details.get('input_tokens')}+{details.get('output_tokens')} tokens"]
    if record.stage == "source":
        told = [f"{name} {value}" for name, value in sorted((details.get("when") or {}).items())]
    case = details.get("case") or {}
    if seed := case.get("seed"):
        told.append(f"seed {seed}")
    if case.get("timed"):
        told.append("timed")
    return f" [{', '.join(told)}]" if told else ""


def _changes(key: Key, old: Evidence | None, new: Evidence | None) -> list[Change]:
    if old is None or new is None:
        return [Change(*key, "new" if old is None else "gone", _words(old), _words(new))]
    why = tuple(name for name in _names() if getattr(old.stack, name) != getattr(new.stack, name))
    found = []
    if (old.verdict, old.kind) != (new.verdict, new.kind):
        found.append(Change(*key, "verdict", _words(old), _words(new), why))
    for number in old.numbers:
        other = new.number(number.name)
        if other is not None and differ(number, other):
            found.append(Change(*key, number.name, _range(number), _range(other), why))
    return found


def _words(record: Evidence | None) -> str:
    if record is None:
        return ""
    kind = f" ({record.kind})" if record.kind else ""
    reason = f": {record.reason}" if record.reason and record.verdict is not Verdict.OK else ""
    return f"{record.verdict}{kind}{reason}"


def _range(number: Number) -> str:
    return f"{number.value:g} [{number.low:g}, {number.high:g}] {number.unit}"


def _versions(before: Sequence[Evidence], after: Sequence[Evidence]) -> dict[str, tuple[str | None, str | None]]:
    """Fields of the stacks that differ; each side's are those of its last record that knows the field."""
    old, new = ({name: _latest(rows, name) for name in _names()} for rows in (before, after))
    return {name: (old[name], new[name]) for name in _names() if old[name] != new[name]}


def _names() -> list[str]:
    return [field.name for field in dataclasses.fields(Stack)]


def _latest(records: Sequence[Evidence], name: str) -> str | None:
    return next((value for record in reversed(records) if (value := getattr(record.stack, name))), None)
