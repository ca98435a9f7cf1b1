"""Which backends a record really speaks of.

A server arm names flags, and flags are not kernels: `auto` is what it became, and a flag whose operation has no FP4 layer
in the arm's checkpoint was judged by nobody. A kernel's own name stands for a flag only where the flag leads to it.
"""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping, Sequence

from nvfp4lab.decide.question import OPS, backends_of, case_of
from nvfp4lab.kernels.flag_values import FLAG_OF
from nvfp4lab.records import Evidence
from nvfp4lab.server import which_kernel

Named = dict[str, str]  # op -> backend
_BECOMES = re.compile(r"(?:auto becomes|builds a MoeRunner for) (\S+)")
_ELSEWHERE = "silently goes elsewhere"
_WORKS = "works as far as source shows"


@dataclasses.dataclass(frozen=True)
class Auto:
    """What `auto` of one op becomes on this stack and GPU.

    backend: a flag value, None where the witnesses do not single one out. how: which witnesses. raises: why a server with it
    would not start, "" where source shows a way. otherwise: what it becomes under conditions that were not asked about.
    conflict: where source and trace disagree. records: the routes read.
    """

    op: str
    backend: str | None
    how: str
    raises: str = ""
    otherwise: tuple[str, ...] = ()
    conflict: str = ""
    records: tuple[Evidence, ...] = ()

    @property
    def line(self) -> str:
        """One sentence for a person."""
        rest = f"; {'; '.join(self.otherwise)}" if self.otherwise else ""
        if self.backend is None:
            return f"what {OPS[self.op]} auto becomes here is not known ({self.how}{rest})"
        return f"{OPS[self.op]} auto = {self.backend} here ({self.how}{rest})"


@dataclasses.dataclass(frozen=True)
class Attribution:
    """Built once from all records that hold for a question; `named` then says what one of them speaks of.

    kernels: arm -> op -> what route, log and trace said of it; an arm without witnesses is absent.
    elsewhere: flag values that source shows to end in another kernel than their own.
    """

    autos: Mapping[str, Auto]
    kernels: Mapping[str, Mapping[str, Mapping]]
    elsewhere: frozenset[tuple[str, str]]

    def named(self, record: Evidence) -> Named:
        """The backends that `record` is evidence for, by op."""
        flags = backends_of(record)
        if record.stage in ("server", "load"):
            return self._of_arm(record, flags)
        own_name = record.stage == "kernel" and case_of(record).get("backend") in FLAG_OF
        return {op: backend for op, backend in flags.items() if not (own_name and (op, backend) in self.elsewhere)}

    def moot_in(self, record: Evidence) -> tuple[str, ...]:
        """Ops whose flag an arm gives although its own witnesses found no FP4 layer for them."""
        seen = self.kernels.get(arm_key(record))
        return tuple(op for op in backends_of(record) if seen is not None and op not in seen)

    def _of_arm(self, record: Evidence, flags: Named) -> Named:
        seen = self.kernels.get(arm_key(record))
        found = {}
        for op in OPS:
            flag = flags.get(op, "auto")
            if seen is not None and op not in seen:
                continue
            if flag != "auto":
                found[op] = flag
            elif op in flags or seen is not None:
                found[op] = _became(op, seen, self.autos.get(op)) or "auto"
        return found


def attribute(records: Sequence[Evidence]) -> Attribution:
    """Read routes and witnesses out of `records`, which all hold for one stack and GPU."""
    kernels = _witnesses(records)
    read = {op: auto for op in OPS if (auto := _read(op, records))}
    autos = {op: auto for op in OPS if (auto := _with_traces(op, read.get(op), _traces(op, records, kernels)))}
    elsewhere = frozenset(pair for record in _routes(records) if _ends_elsewhere(record) for pair in backends_of(record).items())
    return Attribution(autos, kernels, elsewhere)


def arm_key(record: Evidence) -> str:
    """Names an arm across the records of a run: what it was started with, or its subject."""
    arm = record.details.get("arm")
    return json.dumps(arm, sort_keys=True) if isinstance(arm, dict) else record.subject


def _witnesses(records: Iterable[Evidence]) -> dict[str, dict[str, Mapping]]:
    told = [record for record in records if record.stage == "server" and record.details.get("kernels")]
    return {arm_key(record): {row["operation"]: row for row in record.details["kernels"]} for record in told}


def _routes(records: Iterable[Evidence]) -> list[Evidence]:
    return [record for record in records if record.stage == "source" and backends_of(record)]


def _ends_elsewhere(record: Evidence) -> bool:
    return not record.details.get("when") and record.details.get("expected", "").startswith(_ELSEWHERE)


def _read(op: str, records: Iterable[Evidence]) -> Auto | None:
    """What the routes of `auto` say; None where none was read."""
    routes = [record for record in _routes(records) if op in backends_of(record)]
    autos = [record for record in routes if backends_of(record)[op] == "auto"]
    plain = [record for record in autos if set(record.details.get("when", {})) <= {"auto_left_unresolved"}]
    if not autos:
        return None
    meant = {_route_backend(op, record, routes) for record in plain}
    backend = meant.pop() if len(meant) == 1 else None
    raising = [record.reason for record in plain if record.details.get("expected", "").startswith("raises")]
    others = {
        f"{other} when {_condition(record)}"
        for record in autos
        if record not in plain and (other := _route_backend(op, record, routes)) not in (None, backend)
    }
    how = "read from source" if backend else "source reading does not single one out"
    raises = raising[0] if plain and len(raising) == len(plain) else ""
    return Auto(op, backend, how, raises, tuple(sorted(others)), records=tuple(plain or autos))


def _route_backend(op: str, record: Evidence, routes: Iterable[Evidence]) -> str | None:
    """The flag value that a route of `auto` amounts to: what it is set to, else the only value that ends in the same call."""
    became = [match[1] for hop in record.details.get("hops", ()) if (match := _BECOMES.match(hop["why"])) and match[1] != "auto"]
    if became:
        return became[-1]
    final = record.details.get("final_call")
    same = {
        backends_of(other)[op]
        for other in routes
        if final and other.details.get("final_call") == final and other.details.get("expected") == _WORKS
    } - {"auto"}
    return same.pop() if len(same) == 1 else None


def _condition(record: Evidence) -> str:
    when = {name: value for name, value in record.details["when"].items() if value is not True}
    words = [f"the architecture is {' or '.join(when.pop('model_arch'))}"] if "model_arch" in when else []
    return " and ".join(words + [str(value) for value in when.values()]) or "otherwise"


def _traces(op: str, records: Iterable[Evidence], kernels: Mapping[str, Mapping[str, Mapping]]) -> set[str]:
    """Kernel families that the GPU ran for `op` in arms that left the choice to SGLang."""
    left_open = [r for r in records if r.stage == "server" and backends_of(r).get(op, "auto") == "auto"]
    seen = [row for record in left_open if (row := kernels.get(arm_key(record), {}).get(op))]
    return {family for row in seen if row.get("ok") for family in row.get("trace") or ()}


def _with_traces(op: str, read: Auto | None, traces: set[str]) -> Auto | None:
    """`read` beside what was traced; a trace alone also tells where only one flag value stands for its kernels."""
    if len(traces) != 1:
        return read
    (family,) = traces
    traced = "a server's trace on this GPU"
    if read and read.backend and which_kernel.of_backend(read.backend) == family:
        return dataclasses.replace(read, how=f"read from source, and {traced} shows its kernel")
    if read and read.backend:
        conflict = f"{OPS[op]} auto is read from source as {read.backend}, yet {traced} shows {family} kernels"
        return dataclasses.replace(read, backend=_of_family(op, family), how=f"as {traced} shows", conflict=conflict)
    backend = _of_family(op, family)
    how = f"as {traced} shows" if backend else f"{traced} shows {family} kernels, which several flag values lead to"
    return dataclasses.replace(read, backend=backend, how=how) if read else Auto(op, backend, how)


def _became(op: str, seen: Mapping[str, Mapping] | None, auto: Auto | None) -> str | None:
    """What `auto` became in one arm: its own trace first, then what is known of `auto` here."""
    trace = (seen or {}).get(op, {}).get("trace") or ()
    known = auto.backend if auto else None
    if len(trace) == 1 and (known is None or which_kernel.of_backend(known) != trace[0]):
        return _of_family(op, trace[0])
    return known


def _of_family(op: str, family: str) -> str | None:
    """The flag value for kernels of `family`, where there is just one."""
    values = {value for its_op, value in FLAG_OF.values() if its_op == op and which_kernel.of_backend(value) == family}
    return values.pop() if len(values) == 1 else None
