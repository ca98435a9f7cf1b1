"""What notebooks 22 and 23 show: the cases of one operation, run where they have no record yet, and told."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from nvfp4lab.kernels import plan, sweep_run
from nvfp4lab.params import Params
from nvfp4lab.records import BAD, Evidence, Ledger, Verdict
from nvfp4lab.stack import here


def collect(p: Params, *ops: str) -> list[Evidence]:
    """Evidence of every planned case of these operations, in the order planned, then of what `plan_ladder` added.

    Cases without a record are run first. Raises LabError if the gate is not sound here.
    """
    cases = [case for case in plan.cases(p) if case.shape.op in ops]
    for _ in sweep_run.collect(p, cases):
        pass
    return sweep_run.on_record(p, cases)


def beside_source(p: Params, rows: Sequence[Evidence]) -> str:
    """Where stage 1's reading and this run disagree, from the source records of the same run."""
    from nvfp4lab.kernels import case_expectations  # it imports this module

    cc = here().cc
    source = [row for path in _ledgers(Path(p.run_dir)) for row in Ledger(path) if row.stage == "source" and row.target.cc == cc]
    if not source:
        return (
            f"This run holds no reading of the source for compute capability {cc}; notebook 10 makes one, notebook 40 joins runs."
        )
    found = case_expectations.mismatches(rows, source)
    return "\n\n".join(map(str, found)) or "Source and kernels agree."


def _ledgers(run_dir: Path) -> list[Path]:
    """The run folder's; in a batch, where each notebook has a folder of its own, also those of its other notebooks so far."""
    besides = sorted(run_dir.parent.glob("*/ledger.jsonl")) if run_dir.parent.name == "pieces" else []
    return [run_dir / "ledger.jsonl", *besides]


def backend_of(row: Evidence) -> str:
    return row.details["case"]["backend"]


def shape_of(row: Evidence) -> str:
    """The shape's label as it stands in the subject."""
    return row.subject.split(":")[3]


def failures(rows: Sequence[Evidence]) -> str:
    """One paragraph for each way in which a backend fails: what failed, why, the line that repeats it, where else it fails so."""
    alike: dict[tuple, list[Evidence]] = {}
    for row in rows:
        if row.verdict in BAD:
            kernel, probe, ways = backend_of(row), row.details["case"]["probe"], row.subject.split(":")[4:]
            alike.setdefault((row.verdict, row.kind, kernel, probe, *ways), []).append(row)
    told = []
    for first, *others in alike.values():
        story = f"{first.verdict} {first.kind or ''} {first.subject}\n  {first.reason}\n  {first.repro}"
        told.append(story + (f"\n  and at {', '.join(dict.fromkeys(map(shape_of, others)))}" if others else ""))
    return "\n\n".join(told) or "Nothing failed."


def refusals(rows: Sequence[Evidence]) -> str:
    """Each backend that was refused or not tried: every reason that was given, and at which of its shapes."""
    shapes_of: dict[str, set[str]] = {}
    refused: dict[tuple[str, Verdict, str], list[Evidence]] = {}
    for row in rows:
        shapes_of.setdefault(backend_of(row), set()).add(shape_of(row))
        if _refused(row):
            refused.setdefault((backend_of(row), row.verdict, row.reason), []).append(row)
    told = []
    for (name, verdict, reason), own in sorted(refused.items(), key=lambda item: item[0][0]):
        shapes, of = list(dict.fromkeys(map(shape_of, own))), len(shapes_of[name])
        where = "" if len(shapes) == of else f"at {len(shapes)} of its {of} shapes ({', '.join(shapes)}): "
        told.append(f"{verdict:12} {name:48} {where}{reason}")
    return "\n".join(told) or "Every backend ran."


def _refused(row: Evidence) -> bool:
    return row.verdict in (Verdict.UNSUPPORTED, Verdict.NOT_RUN)


def notes(rows: Sequence[Evidence]) -> str:
    """What sound kernels left to say: conventions that were followed."""
    told = {f"{backend_of(row)}: {row.details['note']}" for row in rows if "note" in row.details}
    conventions = {f"{backend_of(row)}: {text}" for row in rows for text in row.details.get("conventions", ())}
    return "\n".join(sorted(told | conventions)) or "Nothing to say."


def how_timed(rows: Sequence[Evidence]) -> str:
    """How many cases have a time, by which method, and why not by a better one."""
    timed = [row for row in rows if row.number("median_ms")]
    if not timed:
        return "No case was timed: `kernel_timed` is off, or none of those to be timed passed its gate."
    methods = Counter(row.details.get("timing_method", "an unnamed method") for row in timed)
    told = ", ".join(f"{count} by {method}" for method, count in methods.most_common())
    notes = dict.fromkeys(row.details["timing_note"] for row in timed if "timing_note" in row.details)
    return "\n".join([f"{len(timed)} of {len(rows)} cases were timed: {told}.", *notes])


def speeds(rows: Sequence[Evidence]) -> pd.DataFrame:
    """One row for each timed case: median ms with its interval, fraction of the roofline and which side of it bounds,
    TFLOP/s, GB/s, SM clock and power meanwhile, timing method."""
    columns = [
        "backend",
        "shape",
        *(f"{name}_ms" for name in ("median", "low", "high")),
        "roofline_fraction",
        "bound",
        "arithmetic",
    ]
    columns += ["tflop_s", "gb_s", "sm_clock_mhz", "power_w", "method", "source"]
    table = []
    for row in rows:
        if (median := row.number("median_ms")) is None:
            continue
        names = ("roofline_fraction", "tflop_s", "gb_s", "sm_clock_mhz", "power_w")
        found = {name: number.value if (number := row.number(name)) else float("nan") for name in names}
        roofline = {name: row.details.get("roofline", {}).get(name, "") for name in ("bound", "arithmetic")}
        times = {"median_ms": median.value, "low_ms": median.low, "high_ms": median.high}
        said = {"method": row.details.get("timing_method", ""), "source": row.details.get("source", "")}
        table.append({"backend": backend_of(row), "shape": shape_of(row)} | times | found | roofline | said)
    return pd.DataFrame(table, columns=columns)
