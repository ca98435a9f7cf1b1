"""What notebooks 22 and 23 show: the cases of one operation, run where they have no record yet, and told."""

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from nvfp4lab.kernels import plan, sweep_run
from nvfp4lab.kernels.sweep import case_hash
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Ledger, Verdict
from nvfp4lab.stack import capture, here

FAILURES = (Verdict.WRONG, Verdict.CRASH, Verdict.HANG, Verdict.OOM)


def collect(p: Params, *ops: str) -> list[Evidence]:
    """Evidence of every planned case of these operations, in the order planned; cases without a record are run first.

    Raises LabError if the gate is not sound here.
    """
    cases = [case for case in plan.cases(p) if case.shape.op in ops]
    for _ in sweep_run.collect(p, cases):
        pass
    stack = capture()
    latest = {row.details.get("case_hash"): row for row in sweep_run.sweep_of(p, here(), stack).ledger if row.stage == "kernel"}
    return [latest[name] for name in (case_hash(case, stack) for case in cases) if name in latest]


def beside_source(p: Params, rows: Sequence[Evidence]) -> str:
    """Where stage 1's reading and this run disagree, from the source records of the same run folder."""
    from nvfp4lab.kernels import case_expectations  # it imports this module

    ledger = Ledger(Path(p.run_dir) / "ledger.jsonl")
    source = [row for row in ledger if row.stage == "source" and row.target.cc == here().cc]
    if not source:
        return f"No reading of the source for compute capability {here().cc} in {p.run_dir}; notebook 10 makes one."
    found = case_expectations.mismatches(rows, source)
    return "\n\n".join(map(str, found)) or "Source and kernels agree."


def backend_of(row: Evidence) -> str:
    return row.details["case"]["backend"]


def shape_of(row: Evidence) -> str:
    """The shape's label as it stands in the subject."""
    return row.subject.split(":")[3]


def failures(rows: Sequence[Evidence]) -> str:
    """One paragraph for each failure: what failed, why, and the line that repeats it."""
    told = [
        f"{row.verdict} {row.kind or ''} {row.subject}\n  {row.reason}\n  {row.repro}" for row in rows if row.verdict in FAILURES
    ]
    return "\n\n".join(told) or "Nothing failed."


def refusals(rows: Sequence[Evidence]) -> str:
    """Each backend that was refused or not tried, with the reason that was given first."""
    told = {backend_of(row): f"{row.verdict:12} {backend_of(row):48} {row.reason}" for row in reversed(rows) if _refused(row)}
    return "\n".join(told[name] for name in sorted(told)) or "Every backend ran."


def _refused(row: Evidence) -> bool:
    return row.verdict in (Verdict.UNSUPPORTED, Verdict.NOT_RUN)


def notes(rows: Sequence[Evidence]) -> str:
    """What sound kernels left to say: conventions that were followed."""
    told = {f"{backend_of(row)}: {row.details['note']}" for row in rows if "note" in row.details}
    conventions = {f"{backend_of(row)}: {text}" for row in rows for text in row.details.get("conventions", ())}
    return "\n".join(sorted(told | conventions)) or "Nothing to say."


def speeds(rows: Sequence[Evidence]) -> pd.DataFrame:
    """One row for each timed case: median ms with its interval, TFLOP/s, GB/s, fraction of the roofline, timing method."""
    table = []
    for row in rows:
        median = row.number("median_ms")
        if median is None:
            continue
        found = {name: row.number(name) for name in ("tflop_s", "gb_s", "roofline_fraction")}
        table.append(
            {
                "backend": backend_of(row),
                "shape": shape_of(row),
                "source": row.details.get("source", ""),
                "median_ms": median.value,
                "low_ms": median.low,
                "high_ms": median.high,
                **{name: number.value if number else None for name, number in found.items()},
                "bound": row.details.get("roofline", {}).get("bound", ""),
                "method": row.details.get("timing_method", ""),
            }
        )
    return pd.DataFrame(table)
