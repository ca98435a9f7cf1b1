"""An audit as evidence: one record per checkpoint, and one for the trial that shows the audit can see."""

import collections

from nvfp4lab import stack
from nvfp4lab.nvfp4.audit import Report, moot_flags
from nvfp4lab.nvfp4.audit_plant import Trial
from nvfp4lab.records import Evidence, Number, Verdict, WrongKind
from nvfp4lab.report.tables import Html, table

_GIVES_NAN = ("nonfinite", "nan", "missing", "uncalibrated")  # unset memory or NaN reaches the output
_ONLY_INEXACT = (
    "tp_alignment",
    "ep_alignment",
    "config_disagrees",
    "ignore_unmatched",
    "target_unmatched",
    "kv_scale_missing",
    "block_scale_zero",
)


def evidence(report: Report, model: str) -> Evidence:
    """The record of an audited checkpoint; `details.moot_flags` is what decides which arms need not run."""
    counts = collections.Counter(finding.kind for finding in report.findings)
    first = report.findings[0] if report.findings else None
    summary = report.summary
    return Evidence(
        stage="checkpoint",
        subject=f"checkpoint:{model}",
        target=stack.here(),
        stack=stack.capture(),
        verdict=Verdict.WRONG if first else Verdict.OK,
        kind=_worst_kind(counts) if first else None,
        reason=f"{len(report.findings)} findings; first {first.kind} in {first.tensor}: {first.what}" if first else "",
        numbers=(
            Number("findings", len(report.findings), "1"),
            *(Number(f"fp4_{kind.replace(' ', '_')}_layers", count, "1") for kind, count in summary.fp4.items()),
            Number("read_bytes", report.read_bytes, "B"),
            Number("checkpoint_bytes", summary.size_bytes, "B"),
        ),
        repro=f"nvfp4lab audit {report.directory}",
        details={
            "findings_by_kind": dict(counts),
            "moot_flags": moot_flags(summary),
            "architecture": summary.architecture,
            "fp4_layers": {str(kind): count for kind, count in summary.fp4.items()},
            "other_layers": {str(kind): count for kind, count in summary.other.items()},
        },
    )


def evidence_of_trial(trial: Trial, model: str) -> Evidence:
    """Whether the audit named every planted fault, and nothing else."""
    missed = sorted(trial.planted.keys() - trial.found)
    reason = "; ".join(part for part in (f"missed {', '.join(missed)}" if missed else "", *trial.others) if part)
    return Evidence(
        stage="checkpoint",
        subject="audit:planted_faults",
        target=stack.here(),
        stack=stack.capture(),
        verdict=Verdict.OK if trial.passed else Verdict.WRONG,
        kind=None if trial.passed else WrongKind.INEXACT,
        reason=reason,
        numbers=(Number("planted", len(trial.planted), "1"), Number("found", len(trial.found), "1")),
        repro="python -m pytest tests/test_audit_faults.py",
        details={"planted": dict(trial.planted), "model": model},
    )


def findings_table(report: Report) -> Html:
    """One row per finding."""
    columns = ("kind", "tensor", "what", "hurts", "fix")
    return table(columns, ([getattr(finding, column) for column in columns] for finding in report.findings))


def moot_table(report: Report) -> Html:
    """Flags that touch no layer of this checkpoint."""
    return table(("flag", "why it changes nothing here"), moot_flags(report.summary).items())


def trial_table(trial: Trial) -> Html:
    """One row per planted fault."""
    rows = [(kind, tensor, "yes" if kind in trial.found else "NO") for kind, tensor in trial.planted.items()]
    return table(("planted", "in", "found there"), rows)


def _worst_kind(counts: collections.Counter[str]) -> WrongKind:
    if any(word in kind for kind in counts for word in _GIVES_NAN if kind not in _ONLY_INEXACT):
        return WrongKind.NAN
    return WrongKind.INEXACT if all(kind in _ONLY_INEXACT for kind in counts) else WrongKind.GARBAGE
