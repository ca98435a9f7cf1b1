"""What all evidence together says of one backend, and how that is known. The ways of knowing are never mixed."""

import dataclasses
import enum
from collections.abc import Sequence

from nvfp4lab.decide.attribution import Attribution, Auto
from nvfp4lab.decide.question import OPS, case_of
from nvfp4lab.records import Evidence, Verdict, WrongKind

NOT_FOR_EVERY_SHAPE = frozenset({Verdict.UNSUPPORTED, Verdict.OOM})
LESS_EXACT = frozenset({WrongKind.INEXACT, WrongKind.DEGRADED})


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

    decisive: the record that the verdict rests on; records: everything that speaks of the backend. disputed, less_exact: the
    first of such failures of its kernel, as `KernelFailures` has them. alias_of: for `auto`, the backend that it is here and
    whose evidence this is.
    """

    op: str
    backend: str
    verdict: Verdict
    confidence: Confidence | None
    decisive: Evidence | None
    records: tuple[Evidence, ...]
    disputed: Evidence | None = None
    less_exact: Evidence | None = None
    alias_of: str | None = None

    @property
    def served(self) -> bool:
        """Whether a server with it was judged, well or badly."""
        return any(r.stage in ("server", "load") and r.verdict is not Verdict.NOT_RUN for r in self.records)

    @property
    def why(self) -> str:
        """One sentence: the verdict, in whose words, and how it is known."""
        if self.decisive is None:
            return "nothing is known about it"
        return said(self.decisive, self.confidence)


def said(record: Evidence, confidence: Confidence | None) -> str:
    """What one record says, in a sentence: verdict, how it is known, for a kernel which case, and the reason."""
    case = f" of {record.subject}" if record.stage == "kernel" and case_of(record) else ""
    where = f" by a {record.stage} run{case}" if confidence is Confidence.MEASURED else ""
    reason = record.reason.removeprefix(f"{confidence}: ")
    return f"{outcome(record)}, {confidence}{where}" + (f": {reason}" if reason else "")


def doubt(record: Evidence) -> str:
    """A kernel failure that did not decide, in one clause."""
    return f"{record.subject} is {outcome(record)}: {record.reason}"


def outcome(record: Evidence) -> str:
    """The verdict, and in what way it is wrong where it is."""
    return f"{record.verdict} ({record.kind})" if record.kind else str(record.verdict)


def standings(records: Sequence[Evidence], attribution: Attribution) -> list[Standing]:
    """The standing of every backend that any record speaks of, by op and name; `auto` as what it is here."""
    named = [(record, attribution.named(record)) for record in records]
    seen = sorted({pair for _, its in named for pair in its.items()})
    found = {
        (op, backend): _standing(op, backend, [r for r, its in named if its.get(op) == backend], named) for op, backend in seen
    }
    for op, auto in attribution.autos.items():
        if auto.backend and (op, "auto") in found:
            found[op, "auto"] = _alias(auto, found.get((op, auto.backend)), found[op, "auto"])
    return list(found.values())


def _alias(auto: Auto, meant: Standing | None, read: Standing) -> Standing:
    """`auto` judged with the evidence of the backend that it becomes."""
    if auto.raises:
        raising = next(record for record in auto.records if record.reason == auto.raises)
        shown = dataclasses.replace(read, verdict=Verdict.UNSUPPORTED, confidence=Confidence.READ, decisive=raising)
    else:
        shown = dataclasses.replace(meant or read, backend="auto", records=(*(meant.records if meant else ()), *read.records))
    return dataclasses.replace(shown, alias_of=auto.backend)


def _standing(op: str, backend: str, about: list[Evidence], everything: Sequence[tuple[Evidence, dict[str, str]]]) -> Standing:
    """Measured beats read. Among measured, a failure that can be pinned on this backend beats a success. A kernel that is
    right does not help where the source proves that a server refuses the flag."""
    measured = [r for r in about if BASIS.get(r.stage) is Confidence.MEASURED and r.verdict is not Verdict.NOT_RUN]
    kernels = [r for r in measured if r.stage == "kernel"]
    servers = [r for r in measured if r.stage != "kernel"]
    served = sorted((r for r in servers if r.verdict is Verdict.OK), key=lambda r: r.stage == "load")
    blamed = [r for r in servers if r.verdict is not Verdict.OK and _to_blame(op, backend, r, everything)]
    failures = kernel_failures(kernels, judged_right=bool(served))
    will_not = [r for r in kernels if r.verdict in NOT_FOR_EVERY_SHAPE]
    refused = [r for r in about if r.stage == "source" and r.verdict is Verdict.UNSUPPORTED]
    right = [r for r in kernels if r.verdict is Verdict.OK]
    for candidates in (failures.decisive, blamed, served, refused, right, will_not):
        if candidates:
            first = candidates[0]
            right_after_all = first.verdict is Verdict.OK
            doubts = (next(iter(of), None) if right_after_all else None for of in (failures.disputed, failures.less_exact))
            return Standing(op, backend, first.verdict, BASIS[first.stage], first, tuple(about), *doubts)
    built = [r for r in about if r.stage == "compile" and r.verdict is Verdict.OK]
    known = built + [r for r in about if r.stage == "source"]
    decisive = next(iter(known or about), None)
    return Standing(op, backend, Verdict.NOT_RUN, BASIS.get(decisive.stage) if decisive else None, decisive, tuple(about))


@dataclasses.dataclass(frozen=True)
class KernelFailures:
    """Failing kernel records of one backend. decisive: rule it out. disputed: would, had no server with it been judged right.
    less_exact: lack exactness under a probe that asks for more of it than one that the kernel passed; a property, no fault."""

    decisive: tuple[Evidence, ...]
    disputed: tuple[Evidence, ...]
    less_exact: tuple[Evidence, ...]


def kernel_failures(kernels: Sequence[Evidence], judged_right: bool) -> KernelFailures:
    """Sort what failed. A crash, a hang and NaN rule out whatever else was right; what a kernel refuses, or has no memory
    for, is said of one shape and is no failure. judged_right: whether a server with this backend was."""
    probes = {_probe(record) for record in kernels if record.verdict is Verdict.OK}
    decisive, disputed, less_exact = [], [], []
    for record in kernels:
        if record.verdict is Verdict.WRONG and record.kind is not WrongKind.NAN:
            asks_more = record.kind in LESS_EXACT and probes and _probe(record) not in probes
            (less_exact if asks_more else disputed if judged_right else decisive).append(record)
        elif record.verdict not in (Verdict.OK, Verdict.NOT_RUN, *NOT_FOR_EVERY_SHAPE):
            decisive.append(record)
    return KernelFailures(tuple(decisive), tuple(disputed), tuple(less_exact))


def _probe(record: Evidence) -> str | None:
    return case_of(record).get("probe")


def _to_blame(op: str, backend: str, record: Evidence, everything: Sequence[tuple[Evidence, dict[str, str]]]) -> bool:
    """A server arm has two backends: its failure blames this one unless the other fails elsewhere too or this one is right
    in another arm."""
    named = next(its for r, its in everything if r is record)
    others = [(other, named[other]) for other in OPS if other != op and other in named]
    if not others:
        return True
    elsewhere = [(r, its) for r, its in everything if r is not record and BASIS.get(r.stage) is Confidence.MEASURED]
    right_elsewhere = any(r.verdict is Verdict.OK and r.stage != "kernel" and its.get(op) == backend for r, its in elsewhere)
    other_fails_alone = any(_fails(r) and its == {other: name} for r, its in elsewhere for other, name in others)
    return not (right_elsewhere or other_fails_alone)


def _fails(record: Evidence) -> bool:
    of_one_shape = record.stage == "kernel" and record.verdict in NOT_FOR_EVERY_SHAPE
    return record.verdict not in (Verdict.OK, Verdict.NOT_RUN) and not of_one_shape
