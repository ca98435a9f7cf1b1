"""One kernel experiment as data: which backend, which probe, which shape. Picklable, so that a child process can run it.

`run_case(case)` is what a worker calls; `open_case(case)` is the same experiment opened up for timing. Verdict mapping:
an absent package or GPU is `not_run`, what the kernel refuses by itself is `unsupported` in its own words, exhausted
memory is `oom`, a failed gate is `wrong`. Every other exception propagates: whoever runs the case records a crash.
"""

import dataclasses
import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

import torch

from nvfp4lab.errors import LabError
from nvfp4lab.kernels import backends, probes, variants
from nvfp4lab.kernels.backends.base import GLOBAL_SCALES_IN_BF16, ROUTES_FOR_ITSELF, Backend, refusal
from nvfp4lab.kernels.gates import GateResult
from nvfp4lab.kernels.operands import ProbeError, Problem
from nvfp4lab.kernels.probes import Experiment, Form
from nvfp4lab.kernels.probes_realistic import realistic_gemm, realistic_moe
from nvfp4lab.kernels.shapes import SHAPES, Shape
from nvfp4lab.records import Evidence, Number, Stack, Target, Verdict, WrongKind
from nvfp4lab.stack import here

Option = str | int | float | bool


@dataclasses.dataclass(frozen=True)
class Case:
    """One experiment.

    backend, probe: names in `backends.BACKENDS` and `probes.PROBES`.
    options: backend switches as sorted pairs, for example (("autotune", True), ("cuda_graph", True)); hashable.
    timed: also measure speed, if and only if the gate passes before and after.
    source: where the case comes from: a model and its split, or the id of a field report.
    """

    backend: str
    probe: str
    shape: Shape
    seed: int = 0
    options: tuple[tuple[str, Option], ...] = ()
    timed: bool = False
    source: str = ""

    @property
    def subject(self) -> str:
        """Colon-separated as in facts: "gemm:flashinfer_mm_fp4.cudnn:exact_t24:m16n512k1024"."""
        extra = "".join(f":{name}={value}" for name, value in self.options)
        return f"{self.shape.op}:{self.backend}:{self.probe}:{self.shape.label}{extra}"

    @property
    def repro(self) -> str:
        """The command that repeats this case alone."""
        return f"nvfp4lab kernels --case {shlex.quote(self.to_json())}"

    def to_json(self) -> str:
        """One line that `from_json` reads back."""
        return json.dumps(dataclasses.asdict(self) | {"op": self.shape.op}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> "Case":
        """Inverse of `to_json`. Raises LabError on anything else."""
        try:
            row = dict(json.loads(line))
            if missing := {"op", "shape", "backend", "probe"} - row.keys():
                raise ValueError(f"it lacks {', '.join(sorted(missing))}")
            if row["op"] not in SHAPES:
                raise ValueError(f"no op {row['op']!r}; there are {', '.join(SHAPES)}")
            shape = SHAPES[row.pop("op")](**row.pop("shape"))
            return cls(**row | {"shape": shape, "options": tuple((name, value) for name, value in row.get("options", ()))})
        except (ValueError, TypeError) as error:
            raise LabError(f"not a kernel case: {line!r}: {error}") from error


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """What a case found; picklable. `details` is JSON-able (place of the first bad value, conventions, options)."""

    verdict: Verdict
    reason: str = ""
    kind: WrongKind | None = None
    numbers: tuple[Number, ...] = ()
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def evidence(self, case: Case, target: Target, stack: Stack) -> Evidence:
        """This result as a ledger record."""
        details = dict(self.details) | {"case": json.loads(case.to_json())} | ({"source": case.source} if case.source else {})
        return Evidence(
            "kernel", case.subject, target, stack, self.verdict, case.repro, self.reason, self.kind, self.numbers, details=details
        )


@dataclasses.dataclass(frozen=True)
class OpenCase:
    """A case made ready on its device. Live objects: never pickled.

    call: runs the kernel once on the probe's operands and returns its output. check: gates one output of `call`.
    timed_call: the same on realistic operands. A probe's operands have few distinct bits: the card draws less power on them,
    holds a higher clock and would look faster than any model makes it.
    flops, min_bytes: the work of one call; bytes count each operand once, as stored.
    can_be_captured: the backend says that its call may be captured in a CUDA graph.
    """

    call: Callable[[], torch.Tensor]
    check: Callable[[torch.Tensor], CaseResult]
    timed_call: Callable[[], torch.Tensor]
    flops: float
    min_bytes: float
    device: torch.device
    can_be_captured: bool = False


def open_case(case: Case) -> OpenCase:
    """Build the operands and prepare the weights of a case on its device, for timing. Raises what the backend raises."""
    return _opened(case, backends.find(case.backend), _experiment(case))


def run_case(case: Case) -> CaseResult:
    """Run one case here and now: every probe call, gated; a timed case then is timed and gated again."""
    backend, probe = backends.find(case.backend), probes.find(case.probe)
    if backend.op != case.shape.op or probe.op != case.shape.op:
        raise LabError(f"{case.subject}: backend is for {backend.op}, probe for {probe.op}, shape for {case.shape.op}")
    if why := backend.is_available() or backend.can_run(here(), case.shape):
        return CaseResult(Verdict.NOT_RUN, why)
    try:
        return _judged(case, backend)
    except ProbeError as error:  # says nothing about the kernel
        return CaseResult(Verdict.NOT_RUN, str(error))
    except torch.OutOfMemoryError as error:
        return CaseResult(Verdict.OOM, " ".join(str(error).split())[:300])
    except Exception as error:
        if isinstance(error, LabError) or (words := refusal(error)) is None:
            raise
        return CaseResult(Verdict.UNSUPPORTED, words, details=_details(backend))


def _judged(case: Case, backend: Backend) -> CaseResult:
    experiment = _experiment(case)
    variant = str(dict(case.options).get("variant", "plain"))
    result, count = GateResult(Verdict.NOT_RUN, "the variant offers no kernel here, no tactic for one"), 0
    for label, kernel in variants.kernels(backend, variant, experiment.problem):
        result, count = experiment.judge(kernel), count + 1
        if result.verdict is not Verdict.OK:
            result = dataclasses.replace(result, reason=result.reason if label == "plain" else f"{label}: {result.reason}")
            break
    judged = _case_result(result, _details(backend) | {"variant": variant, "kernels_judged": count})
    if case.timed and judged.verdict is Verdict.OK:
        from nvfp4lab.kernels import timing  # it imports this module

        timed = timing.time_case(_opened(case, backend, experiment))
        return dataclasses.replace(timed, details=dict(judged.details) | dict(timed.details))
    return judged


def _experiment(case: Case) -> Experiment:
    form = _form(backends.find(case.backend))
    return probes.find(case.probe).build(case.shape, case.seed, _device(), form)


def _form(backend: Backend) -> Form:
    return Form(
        weight_only=backend.activations == "bf16",
        global_scales_in_bf16=GLOBAL_SCALES_IN_BF16 in backend.conventions,
        even_routing=ROUTES_FOR_ITSELF in backend.conventions,
    )


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _opened(case: Case, backend: Backend, experiment: Experiment) -> OpenCase:
    draw = {"gemm": realistic_gemm, "moe": realistic_moe}[case.shape.op]
    return OpenCase(
        call=_bound(backend, experiment.problem),
        check=lambda output: _case_result(experiment.check(output), _details(backend)),
        timed_call=_bound(backend, _form(backend).of(draw(case.shape, case.seed, experiment.problem.device))),
        flops=case.shape.flops,
        min_bytes=case.shape.min_bytes(fp4_activations=backend.activations == "fp4"),
        device=experiment.problem.device,
        can_be_captured="cuda_graph" in backend.variants,
    )


def _bound(backend: Backend, problem: Problem) -> Callable[[], torch.Tensor]:
    out = torch.empty(problem.out_shape, dtype=problem.out_dtype, device=problem.device)
    return backend.bind(backend.prepare(problem), problem, out)


def _details(backend: Backend) -> dict[str, Any]:
    return {"arithmetic": backend.arithmetic} | ({"conventions": list(backend.conventions)} if backend.conventions else {})


def _case_result(result: GateResult, details: Mapping[str, Any]) -> CaseResult:
    numbers = (Number("gain", result.gain, "1"),) if result.gain is not None else ()
    place = {"place": dataclasses.asdict(result.place)} if result.place else {}
    note = {"note": result.note} if result.note else {}
    return CaseResult(result.verdict, result.reason, result.kind, numbers, dict(details) | place | note)
