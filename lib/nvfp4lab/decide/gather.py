"""Evidence from run folders, ledgers, or straight from the source that a params file names."""

import dataclasses
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from nvfp4lab import params
from nvfp4lab.decide.question import Question, asked_by
from nvfp4lab.errors import LabError
from nvfp4lab.records import Evidence, Ledger, Stack


def gather(paths: Sequence[Path], overrides: Mapping[str, str | None]) -> tuple[Question | None, list[Evidence]]:
    """(the question, all evidence). A params file is asked about by reading its packages; nothing is run.

    overrides: fields of Question given by hand; None leaves what the evidence or the params file says.
    """
    records: list[Evidence] = []
    asked: Question | None = None
    for path in paths:
        if path.suffix in (".yaml", ".yml"):
            values = params.load(path)
            read = _read_source(values)
            records += read
            asked = asked or _as_read(question_of(values), values, read)
        else:
            records += recorded(path)
    given = {name: value for name, value in overrides.items() if value is not None}
    question = asked or asked_by([record for record in records if _fits(record, given)])
    if question is None and (nearest := asked_by(records)):  # nothing is about what was given: what else is asked stays
        question = dataclasses.replace(nearest, flashinfer=None)
    if question is None and {"cc", "sglang"} <= set(given):
        question = Question(given["cc"], given["sglang"], None)
    return (dataclasses.replace(question, **given) if question else None), records


def _fits(record: Evidence, given: Mapping[str, str]) -> bool:
    """Whether a record is about the GPU and the versions given by hand: what else is asked comes from such records alone."""
    own = {"cc": record.target.cc, "sglang": record.stack.sglang, "flashinfer": record.stack.flashinfer}
    return all(own[name] in (None, value) for name, value in given.items() if name in own)


def question_of(values: params.Params) -> Question:
    """The question that a params file asks. Without a model of its own it asks about none: the default is a fixture's name."""
    model = values.model if "model" in values.model_fields_set else "MODEL"
    flag = values.quant if values.flag_given else None
    return Question(values.cc, _version(values.sglang), _version(values.flashinfer), model, values.tp, flag)


def _version(source: str | None) -> str | None:
    """The version that a PyPI version or a wheel's file name says; None for a folder, which only a reading could tell."""
    named = re.match(r"[\w.]+-(\d[^-]*)-.*\.whl$", Path(source or "").name)
    return named[1] if named else source if re.match(r"\d[\w.!+]*$", source or "") else None


def _as_read(question: Question, values: params.Params, read: Sequence[Evidence]) -> Question:
    """The question with the versions that were read, where a folder was named. A FlashInfer that nobody named stays open."""
    stack = read[0].stack if read else Stack()
    flashinfer = question.flashinfer or (stack.flashinfer if values.flashinfer else None)
    return dataclasses.replace(question, sglang=question.sglang or stack.sglang, flashinfer=flashinfer)


def recorded(path: Path) -> list[Evidence]:
    """All evidence of a run folder or a ledger file; damaged lines are counted on stderr. Raises LabError when it is neither."""
    ledger = path if path.is_file() else path / "ledger.jsonl"
    if not ledger.exists():
        raise LabError(f"{path}: neither a run folder with a ledger.jsonl, nor a ledger")
    records, damaged = list(Ledger(ledger)), Ledger(ledger).damaged()
    if damaged and not records and ledger == path:
        raise LabError(f"{path}: no ledger: none of its lines is a record; name a run folder or its ledger.jsonl")
    if damaged:
        print(f"{ledger}: {damaged} damaged {'line is' if damaged == 1 else 'lines are'} left out", file=sys.stderr)
    return records


def _read_source(values: params.Params) -> list[Evidence]:
    from nvfp4lab.source import routes_evidence

    return routes_evidence.read(values)
