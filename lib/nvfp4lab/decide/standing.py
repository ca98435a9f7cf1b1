"""What all evidence together says of one backend, and how that is known. The ways of knowing are never mixed."""

import dataclasses
import enum
from collections.abc import Iterable, Sequence

from nvfp4lab.decide.question import OPS, backends_of
from nvfp4lab.records import Evidence, Number, Verdict

BAD = frozenset({Verdict.WRONG, Verdict.CRASH, Verdict.HANG, Verdict.OOM})
THROUGHPUT_NAMES = ("output_tok_s", "output_throughput_tok_s", "throughput_tok_s")


class Confidence(enum.StrEnum):
    """How something is known, strongest first."""

    MEASURED = "measured on this GPU"
    COMPILED = "compiled for it"
    READ = "read from source"
    REPORTED = "reported by others"


BASIS: dict[str, Confidence] = {
    "server": Confidence.MEASURED,
    "load": Confidence.MEASURED,
    "kernel": Confidence.MEASURED,
    "compile": Confidence.COMPILED,
    "source": Confidence.READ,
}


@dataclasses.dataclass(frozen=True)
class Standing:
    """One backend of one op. verdict: OK, a bad one, UNSUPPORTED, or NOT_RUN when nothing decides it.

    decisive: the record that the verdict rests on; records: everything that speaks of the backend.
    """

    op: str
    backend: str
    verdict: Verdict
    confidence: Confidence | None
    decisive: Evidence | None
    records: tuple[Evidence, ...]

    @property
    def why(self) -> str:
        """One sentence: the verdict, in whose words, and how it is known."""
        if self.decisive is None:
            return "nothing is known about it"
        kind = f" ({self.decisive.kind})" if self.decisive.kind else ""
        where = f" by a {self.decisive.stage} run" if self.confidence is Confidence.MEASURED else ""
        reason = self.decisive.reason.removeprefix(f"{self.confidence}: ")
        return f"{self.verdict}{kind}, {self.confidence}{where}" + (f": {reason}" if reason else "")


def standings(records: Sequence[Evidence]) -> list[Standing]:
    """The standing of every backend that any record names, by op and name."""
    seen = sorted({(op, backend) for record in records for op, backend in backends_of(record).items()})
    return [_standing(op, backend, [r for r in records if backends_of(r).get(op) == backend], records) for op, backend in seen]


def _standing(op: str, backend: str, about: list[Evidence], everything: Sequence[Evidence]) -> Standing:
    """Measured beats read; among measured, a failure that can be pinned on this backend beats a success."""
    measured = [r for r in about if BASIS.get(r.stage) is Confidence.MEASURED and r.verdict is not Verdict.NOT_RUN]
    blamed = [r for r in measured if r.verdict is not Verdict.OK and _to_blame(op, backend, r, everything)]
    good = [r for r in measured if r.verdict is Verdict.OK]
    refused = [r for r in about if r.stage == "source" and r.verdict is Verdict.UNSUPPORTED]
    known = [r for r in about if r.stage in ("source", "compile")]
    for candidates in (blamed, sorted(good, key=lambda r: r.stage == "kernel"), refused):
        if candidates:
            return Standing(op, backend, candidates[0].verdict, BASIS[candidates[0].stage], candidates[0], tuple(about))
    decisive = known[0] if known else (about[0] if about else None)
    return Standing(op, backend, Verdict.NOT_RUN, BASIS.get(decisive.stage) if decisive else None, decisive, tuple(about))


def _to_blame(op: str, backend: str, record: Evidence, everything: Sequence[Evidence]) -> bool:
    """A kernel case names its one backend. A server arm has two: it blames this one unless the other fails elsewhere too
    or this one is right in another arm."""
    named = backends_of(record)
    others = [(other, named[other]) for other in OPS if other != op and other in named]
    if not others:
        return True
    elsewhere = [r for r in everything if r is not record and BASIS.get(r.stage) is Confidence.MEASURED]
    right_elsewhere = any(r.verdict is Verdict.OK and r.stage != "kernel" and backends_of(r).get(op) == backend for r in elsewhere)
    other_fails_alone = any(
        r.verdict is not Verdict.OK and r.verdict is not Verdict.NOT_RUN and backends_of(r) == {other: name}
        for r in elsewhere
        for other, name in others
    )
    return not (right_elsewhere or other_fails_alone)


def throughput(records: Iterable[Evidence]) -> Number | None:
    """The best sound throughput among load records (tok/s), or None."""
    numbers = [record.number(name) for record in records if record.verdict is Verdict.OK for name in THROUGHPUT_NAMES]
    return max((number for number in numbers if number is not None), key=lambda number: number.value, default=None)


def overlap(one: Number, other: Number) -> bool:
    """Whether two intervals overlap; without intervals, whether the values are within 3 %: less than runs differ by."""
    if None in (one.low, one.high, other.low, other.high):
        return abs(one.value - other.value) <= 0.03 * max(abs(one.value), abs(other.value))
    return one.low <= other.high and other.low <= one.high
