"""A whole kernel run: the gate's own certificate, the card's peaks, then every case that has no record yet.

Order matters. A gate that would let a broken kernel through judges none, so the certificate comes first. Peaks come from
the same card in the same run as the times that are set beside them.
"""

import dataclasses
import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path

from nvfp4lab.batch.progress import Progress
from nvfp4lab.errors import LabError
from nvfp4lab.kernels import certificate, plan_ladder, roofline
from nvfp4lab.kernels.cases import Case
from nvfp4lab.kernels.isolate import Isolator
from nvfp4lab.kernels.isolate_outcome import Limits
from nvfp4lab.kernels.roofline import Peaks
from nvfp4lab.kernels.sweep import Sweep, case_hash, latest
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Ledger, Stack, Target, Verdict
from nvfp4lab.stack import capture, here

_PEAKS_TIMEOUT_S = 300.0
# SGLang's own modules cannot be had beforehand: sgl_kernel asks the GPU for its capability on import. What they import can.
# Importing SGLang was 11 of the 14 s of a Marlin case on an H200; with these beforehand it takes 0.8 s instead of 4.4 on a CPU.
SGLANG_IMPORTS = (
    "transformers.modeling_layers",
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "torchvision",
    "scipy.optimize",
    "compressed_tensors.config",
    "accelerate",
    "aiohttp",
)


def sweep_of(p: Params, target: Target, stack: Stack) -> Sweep:
    """The sweep that the parameters ask for on this machine. One worker where there is a GPU: cases share its clock."""
    run_dir = Path(p.run_dir)
    limits = Limits(timeout_s=p.kernel_timeout_s, memory_bytes=int(p.kernel_memory_gib * 2**30))
    workers = p.kernel_workers if target.cc == "cpu" else 1
    return Sweep(Ledger(run_dir / "ledger.jsonl"), run_dir, target, stack, limits, workers)


def collect(p: Params, cases: Sequence[Case], again: bool = False) -> Iterator[Evidence]:
    """Run what is pending of `cases` (all of them with `again`), then what `plan_ladder` adds, with progress on stderr.

    Each evidence is in the run's ledger when it is yielded: first the gate's, then the peaks' if cases are timed, then the
    cases' in the order in which they end. Raises LabError if the gate is not sound here; no case has run then.
    """
    sweep = sweep_of(p, here(), capture())
    todo = list(dict.fromkeys(cases)) if again else sweep.pending(cases)
    if todo:
        sweep = yield from _opened(sweep, todo)
        yield from _run(sweep, todo)
    more = sweep.pending(narrower(cases, latest(sweep.ledger), sweep.stack))
    if more and not todo:
        sweep = yield from _opened(sweep, more)
    yield from _run(sweep, more)


def _opened(sweep: Sweep, todo: Sequence[Case]) -> Generator[Evidence, None, Sweep]:
    """The gate's certificate, then the peaks where a case is timed; returns the sweep with them."""
    yield _certificate(sweep)
    peaks = None
    if any(case.timed for case in todo):
        measured, peaks = measure_peaks(sweep)
        yield measured
    of_sglang = sweep.target.cc != "cpu" and any(case.backend.startswith("sglang.") for case in todo)  # a CPU calls none
    return dataclasses.replace(sweep, peaks=peaks, wishes=SGLANG_IMPORTS if of_sglang else ())


def _run(sweep: Sweep, todo: Sequence[Case]) -> Iterator[Evidence]:
    if not todo:
        return
    with Progress(len(todo), "kernels") as progress:
        for evidence in sweep(todo):
            progress.step(describe(evidence))
            yield evidence


def recorded(p: Params, cases: Sequence[Case]) -> list[Evidence]:
    """Of `on_record` what `collect` leaves out as done."""
    return [row for row in on_record(p, cases) if row.verdict is not Verdict.NOT_RUN]


def on_record(p: Params, cases: Sequence[Case]) -> list[Evidence]:
    """What the run's ledger says last of `cases`, then of what `plan_ladder` adds, in their order; under this stack."""
    sweep = sweep_of(p, here(), capture())
    rows = latest(sweep.ledger)
    names = dict.fromkeys(case_hash(case, sweep.stack) for case in (*cases, *narrower(cases, rows, sweep.stack)))
    return [rows[name] for name in names if name in rows]


def narrower(cases: Sequence[Case], rows: Mapping[str, Evidence], stack: Stack) -> tuple[Case, ...]:
    """What `plan_ladder` adds to `cases`. rows: by case hash; of any stack, those of `stack` count, whatever was asked for."""
    known = ((name, Case.from_json(json.dumps(row.details["case"])), row.verdict) for name, row in rows.items())
    return plan_ladder.narrower(cases, {case: verdict for name, case, verdict in known if case_hash(case, stack) == name})


def describe(evidence: Evidence) -> str:
    """One line for a person: which case, how it ended, how fast it was or why it was not."""
    median = evidence.number("median_ms")
    said = f": {evidence.reason}" if evidence.reason else f", {median.value:.4g} ms" if median else ""
    return f"{evidence.subject} {evidence.verdict}{said}"


def _certificate(sweep: Sweep) -> Evidence:
    evidence = certificate.certify(seeds=certificate.QUICK_SEEDS).evidence(sweep.target, sweep.stack)
    sweep.ledger.append(evidence)
    if evidence.verdict is not Verdict.OK:
        raise LabError(f"the gate is not sound on this machine, so no kernel was judged: {evidence.reason}; see `nvfp4lab certify`")
    return evidence


def measure_peaks(sweep: Sweep) -> tuple[Evidence, Peaks | None]:
    """Measure the card's peaks in a worker of their own; (evidence, peaks or None if that failed)."""
    device = "cpu" if sweep.target.cc == "cpu" else "cuda"
    log_dir = sweep.run_dir / "logs" / "kernels"
    with Isolator(log_dir, sweep.preload) as isolator:
        outcome = isolator.run(roofline.measure_peaks, device, name="peaks", limits=Limits(_PEAKS_TIMEOUT_S), expect=Peaks)
    peaks = outcome.value
    evidence = Evidence(
        "kernel",
        f"peaks:{device}",
        sweep.target,
        sweep.stack,
        outcome.verdict,
        "nvfp4lab kernels PARAMS",
        outcome.reason,
        numbers=peaks.numbers() if peaks else (),
        details={"refused": peaks.refused, "timing_method": peaks.method} if peaks else {"output_tail": outcome.output_tail},
    )
    sweep.ledger.append(evidence)
    return evidence, peaks
