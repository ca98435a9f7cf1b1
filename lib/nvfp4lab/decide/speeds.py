"""Speeds side by side: only what was measured alike is compared, and "no difference" is a finding.

Servers are compared at one load (same model, sizes and further flags, same concurrency and lengths), kernels over the
cases that all of them ran (same operands' shapes and M, same way of timing). Numbers of two GPUs or
versions are never compared.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence

from nvfp4lab.decide.question import case_of
from nvfp4lab.records import Evidence, Number, Verdict
from nvfp4lab.report.digits import interval

THROUGHPUT_NAMES = ("output_tok_s", "output_throughput_tok_s", "throughput_tok_s")
Measured = Mapping[Hashable, Number]  # where it was measured -> the number


@dataclasses.dataclass(frozen=True)
class Ranking:
    """What is fastest of the things named in `speeds`.

    speeds: the numbers compared, by thing. best: None when nothing was measured. ties: things whose interval overlaps the
    best's. where: what was compared, in words. apart: things that were timed, but not at what the others were timed at.
    remarks: what else a reader must know, one sentence each.
    """

    speeds: Mapping[Hashable, Number]
    best: Hashable | None
    ties: tuple[Hashable, ...]
    where: str
    apart: tuple[Hashable, ...] = ()
    remarks: tuple[str, ...] = ()


NOTHING = Ranking({}, None, (), "")


def of_servers(arms: Mapping[Hashable, Sequence[Evidence]], tp: int = 1, words: Callable[[Hashable], str] = str) -> Ranking:
    """Throughput in tok/s at the load that most arms were measured at; of equals one at this tp, then the highest concurrency."""
    measured = {arm: found for arm, about in arms.items() if (found := _loads(about))}
    if not measured:
        return NOTHING
    loads = {load for found in measured.values() for load in found}
    shared = {load: [arm for arm in measured if load in measured[arm]] for load in loads}
    chosen = max(loads, key=lambda load: (load.tp == tp, len(shared[load]), load.concurrency or 0, load.setting))
    speeds = {arm: measured[arm][chosen] for arm in shared[chosen]}
    best = max(speeds, key=lambda arm: speeds[arm].value)
    ties = tuple(arm for arm in speeds if arm != best and not _told_apart(speeds[arm], speeds[best]))
    started_once = [arm for arm in (best, *ties) if speeds[arm].n == 1]
    remarks = ["of one start alone nobody knows by how much the next would differ"] if ties and started_once else []
    for load in sorted(loads - {chosen}, key=lambda load: load.concurrency or 0):
        rivals = [arm for arm in shared[load] if best in shared[load] and _beats(measured[arm][load], measured[best][load])]
        if rivals and load.setting == chosen.setting:
            faster = max(rivals, key=lambda arm: measured[arm][load].value)
            remarks.append(f"at {load.words} {words(faster)} is faster: {interval(measured[faster][load])}")
    return Ranking(speeds, best, ties, chosen.words, tuple(arm for arm in measured if arm not in speeds), tuple(remarks))


def of_kernels(backends: Mapping[Hashable, Sequence[Evidence]]) -> Ranking:
    """Median time in ms over the cases shared by all backends: the geometric mean, so that each shape counts alike.

    Its interval is that of the medians' lower and of their upper bounds: wider than a joint one, never narrower. Compared
    are as many backends as have a case in common; the others are set apart.
    """
    timed = {backend: found for backend, records in backends.items() if (found := _times(records))}
    if not timed:
        return NOTHING
    cases = {case for found in timed.values() for case in found}
    groups = {tuple(backend for backend in timed if case in timed[backend]) for case in cases}
    group = max(groups, key=lambda group: (len(group), len(_common(timed, group)), group))
    apart, timed = [backend for backend in timed if backend not in group], {backend: timed[backend] for backend in group}
    common = _common(timed, group)
    speeds = {backend: _mean([found[case] for case in common]) for backend, found in timed.items()}
    best = min(speeds, key=lambda backend: speeds[backend].value)
    ties = tuple(backend for backend in speeds if backend != best and overlap(speeds[backend], speeds[best]))
    gpu, method = ({case[place] for case in common} for place in (-1, -2))
    counted = "1 case" if len(common) == 1 else f"{len(common)} cases (geometric mean)"
    where = f"{counted} on {' and '.join(sorted(filter(None, gpu))) or 'this GPU'}, timed by {' and '.join(sorted(method))}"
    return Ranking(speeds, best, ties, where, tuple(apart), _slower_somewhere(best, timed, common))


def overlap(one: Number, other: Number) -> bool:
    """Whether two intervals overlap; without intervals, whether the values are within 3 %: less than runs differ by."""
    if None in (one.low, one.high, other.low, other.high):
        return abs(one.value - other.value) <= 0.03 * max(abs(one.value), abs(other.value))
    return one.low <= other.high and other.low <= one.high


@dataclasses.dataclass(frozen=True)
class _Load:
    """What must be equal for two throughputs to be comparable. setting: the arm without name and backends, versions, GPU."""

    setting: str
    tp: int
    concurrency: int | None
    input_tokens: int | None
    output_tokens: int | None

    @property
    def words(self) -> str:
        if self.concurrency is None:
            return "the load measured"
        lengths = f", {self.input_tokens} tokens in, {self.output_tokens} out" if self.input_tokens else ""
        return f"concurrency {self.concurrency}{lengths}"


def _loads(records: Sequence[Evidence]) -> dict[_Load, Number]:
    """Load -> throughput of one arm's sound records; of several at one load the last."""
    found = {}
    for record in records:
        number = next((number for name in THROUGHPUT_NAMES if (number := record.number(name))), None)
        if record.verdict is Verdict.OK and number and number.value:
            arm = record.details.get("arm")
            arm = arm if isinstance(arm, dict) else {}
            own = {key: value for key, value in arm.items() if key not in ("name", "moe_runner_backend", "fp4_gemm_backend")}
            setting = json.dumps([own, _versions(record), gpu_of(record)], sort_keys=True)
            sizes = (record.details.get(name) for name in ("concurrency", "input_tokens", "output_tokens"))
            found[_Load(setting, int(arm.get("tp") or 1), *sizes)] = number
    return found


def _times(records: Sequence[Evidence]) -> dict[tuple, Number]:
    """(shape and options, versions, cold L2, timing method, GPU) -> median time of one backend's sound, timed cases."""
    found = {}
    for record in records:
        median = record.number("median_ms")
        if record.stage == "kernel" and record.verdict is Verdict.OK and median and median.value:
            case, details = case_of(record), record.details
            asked = json.dumps([case.get("shape"), case.get("options")], sort_keys=True)
            shape = asked if case else record.subject.split(":", 3)[-1]
            timing = (details.get("cold_l2"), details.get("timing_method", "an unnamed method"))
            found[shape, _versions(record), *timing, gpu_of(record)] = median
    return found


def _versions(record: Evidence) -> tuple[str | None, str | None]:
    return record.stack.sglang, record.stack.flashinfer


def gpu_of(record: Evidence) -> str | None:
    """The GPU's name, where the record knows it."""
    return record.target.name or record.stack.gpu


def _common(timed: Mapping[Hashable, Measured], group: Sequence[Hashable]) -> set:
    return set.intersection(*(set(timed[backend]) for backend in group))


def _mean(numbers: Sequence[Number]) -> Number:
    bounded = all(None not in (number.low, number.high) for number in numbers)
    low, high = ([number.low for number in numbers], [number.high for number in numbers]) if bounded else (None, None)
    value = _geometric([number.value for number in numbers])
    return Number("median_ms", value, "ms", low and _geometric(low), high and _geometric(high), len(numbers))


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _slower_somewhere(best: Hashable, timed: Mapping[Hashable, Measured], common: set) -> tuple[str, ...]:
    """The backends that beat the best one in some of the cases, beyond the intervals."""
    told = []
    for backend, found in timed.items():
        wins = sum(found[case].value < timed[best][case].value and not overlap(found[case], timed[best][case]) for case in common)
        if backend != best and wins:
            told.append(f"{backend} is faster in {wins} of them")
    return tuple(told)


def _beats(one: Number, other: Number) -> bool:
    return one.value > other.value and _told_apart(one, other)


def _told_apart(one: Number, other: Number) -> bool:
    """Whether two throughputs differ. Of a single start (`n`) the interval is that of its requests and says nothing of starts."""
    return 1 not in (one.n, other.n) and not overlap(one, other)
