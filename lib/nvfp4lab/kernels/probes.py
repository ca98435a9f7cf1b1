"""All probes by name, each with what it can and cannot detect, and the boundary shapes.

A probe builds an `Experiment`: the problem, a judge that runs a kernel on it (poisoned output, guard rows around it,
several calls where the probe needs them), and a check of one output, for gating again after timing.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch

from nvfp4lab.errors import LabError
from nvfp4lab.kernels import gates
from nvfp4lab.kernels.gates import GateResult
from nvfp4lab.kernels.operands import Fp4Operand, ProbeError, Problem
from nvfp4lab.kernels.poison import GuardBroken, run_poisoned
from nvfp4lab.kernels.probes_exact import ExactGemm, exact_gemm
from nvfp4lab.kernels.probes_metamorphic import RELATIONS, Relation
from nvfp4lab.kernels.probes_moe import answered_by, exact_moe
from nvfp4lab.kernels.probes_quantise import quantise_codes
from nvfp4lab.kernels.probes_realistic import realistic_gemm, realistic_moe
from nvfp4lab.kernels.probes_rounding import global_scale_gemm, rounding_gemm, small_results_gemm
from nvfp4lab.kernels.reference import Kernel
from nvfp4lab.kernels.reference_bounds import gemm_expectation, moe_expectation
from nvfp4lab.kernels.shapes import Shape
from nvfp4lab.records import Verdict, WrongKind


@dataclasses.dataclass(frozen=True)
class Experiment:
    """One probe at one shape, ready for any kernel."""

    problem: Problem
    judge: Callable[[Kernel], GateResult]
    check: Callable[[torch.Tensor], GateResult]


@dataclasses.dataclass(frozen=True)
class Form:
    """How a problem is handed over. The expectation is of what is handed over, so neither costs a kernel its verdict.

    weight_only: activations as the bf16 tensor that a W4A16 kernel takes.
    global_scales_in_bf16: global scales of the weights rounded to bf16, for a backend whose loader does that; what the
    rounding costs is the subject of a probe of its own, `global_scale`.
    even_routing: equal router weights in exact probes, for a kernel that computes them itself: no softmax gives 1, 1/2, 1/2.
    """

    weight_only: bool = False
    global_scales_in_bf16: bool = False
    even_routing: bool = False

    def of(self, problem: Problem) -> Problem:
        """The problem in this form."""
        changes: dict = {}
        if self.weight_only and isinstance(getattr(problem, "activations", None), Fp4Operand):
            changes["activations"] = problem.activations.value(torch.bfloat16)
        if self.global_scales_in_bf16:
            parts = [name for name in ("weights", "gate", "up", "down") if hasattr(problem, name)]
            changes |= {name: _in_bf16(getattr(problem, name)) for name in parts}
        return dataclasses.replace(problem, **changes)


def _in_bf16(operand: Fp4Operand) -> Fp4Operand:
    return dataclasses.replace(operand, global_scale=operand.global_scale.bfloat16().float())


PLAIN = Form()


@dataclasses.dataclass(frozen=True)
class Probe:
    """build(shape, seed, device, form) -> Experiment. weight_only: its activations fit W4A16 kernels only."""

    name: str
    op: str
    detects: str
    blind_to: str
    make: Callable[[Shape, int, torch.device | str, Form], Experiment]
    weight_only: bool = False

    def build(self, shape: Shape, seed: int, device: torch.device | str, form: Form = PLAIN) -> Experiment:
        """The experiment at one shape. Raises ProbeError where the probe cannot serve as an oracle there."""
        return self.make(shape, seed, device, form)


def _experiment(
    problem: Problem, judge: Callable[[Callable], GateResult], check: Callable[[torch.Tensor], GateResult]
) -> Experiment:
    def guarded(kernel: Kernel) -> GateResult:
        try:
            return judge(functools.partial(run_poisoned, kernel))
        except GuardBroken as broken:
            return GateResult(Verdict.WRONG, str(broken), WrongKind.GARBAGE)

    return Experiment(problem, guarded, check)


def _single(problem: Problem, check: Callable[[torch.Tensor], GateResult]) -> Experiment:
    return _experiment(problem, lambda run: check(run(problem)), check)


def _exact_gemm(shape, seed, device, form: Form, make: Callable[..., ExactGemm]) -> Experiment:
    probe = make(shape, seed, device=device)
    return _single(form.of(probe.problem), functools.partial(gates.exact, expected=probe.expected))


def _tier(bits: int, bf16_activations: bool = False) -> Callable[..., ExactGemm]:
    return functools.partial(exact_gemm, bits=bits, bf16_activations=bf16_activations)


def _global_scale(shape, seed, device, form: Form) -> Experiment:
    probe = global_scale_gemm(shape, seed, device)
    handed_over = dataclasses.replace(form, global_scales_in_bf16=False).of(probe.problem)
    return _single(handed_over, functools.partial(gates.exact, expected=probe.expected))


def _exact_moe(shape, seed, device, form: Form, ratio: float = 1.0, skewed: bool = False, small: bool = False) -> Experiment:
    probe = exact_moe(shape, seed, device, ratio, skewed, small, form.even_routing)
    return _single(
        form.of(probe.problem), functools.partial(gates.exact, expected=probe.expected, experts=probe.problem.topk_ids[:, 0])
    )


def _expert_number(shape, seed, device, form: Form) -> Experiment:
    """Top-1 whatever the shape's top-k; a wrong row is asked whose answer it is."""
    probe = exact_moe(dataclasses.replace(shape, topk=1), seed, device)
    experts = probe.problem.topk_ids[:, 0]

    def check(actual: torch.Tensor) -> GateResult:
        result = gates.exact(actual, probe.expected, experts)
        if result.place is None:
            return result
        token = result.place.row
        who = answered_by(probe.problem, token, actual[token])
        said = f"token {token} has the answer of expert {who}" if who is not None else f"token {token} has no expert's answer"
        return dataclasses.replace(result, reason=f"{said}, asked was expert {int(experts[token])}; {result.reason}")

    return _single(form.of(probe.problem), check)


def _realistic(shape, seed, device, form: Form) -> Experiment:
    problem = form.of(realistic_gemm(shape, seed, device))
    expected, tolerance = gemm_expectation(problem)
    return _single(problem, functools.partial(gates.within, expected=expected, tolerance=tolerance))


def _realistic_moe(shape, seed, device, form: Form) -> Experiment:
    problem = form.of(realistic_moe(shape, seed, device))
    expected, tolerance = moe_expectation(problem)
    return _single(problem, functools.partial(gates.within, expected=expected, tolerance=tolerance, experts=problem.topk_ids[:, 0]))


def _quantise(shape, seed, device, form: Form) -> Experiment:
    probe = quantise_codes(shape, seed, device)
    return _single(probe.problem, probe.check)


def _related(shape, seed, device, form: Form, relation: Relation) -> Experiment:
    if relation.weighs and form.even_routing:
        raise ProbeError(f"{relation.name}: a kernel that computes its router weights cannot be asked to give an expert none")
    if relation.on_realistic:
        single = _realistic(shape, seed, device, form)
    else:
        gemm = relation.op == "gemm"
        single = _exact_gemm(shape, seed, device, form, _tier(24)) if gemm else _exact_moe(shape, seed, device, form)
    return _experiment(single.problem, lambda run: relation.judge(run, single.problem, seed), single.check)


_EXACT_BLIND = "how the output is rounded (it needs no rounding); faults that need another shape or a second call"
_PROBES = (
    *(
        Probe(
            f"exact_t{bits}",
            "gemm",
            f"any wrong code, scale, column or row; an accumulator of fewer than {bits} significant bits",
            _EXACT_BLIND,
            functools.partial(_exact_gemm, make=_tier(bits)),
        )
        for bits in (8, 13, 24)
    ),
    Probe(
        "exact_bf16",
        "gemm",
        "activations of a weight-only kernel that lose significand bits on the way",
        _EXACT_BLIND,
        functools.partial(_exact_gemm, make=_tier(24, bf16_activations=True)),
        weight_only=True,
    ),
    Probe(
        "rounding",
        "gemm",
        "another output rounding than to nearest even; rounding twice",
        "errors below half an ulp of bf16",
        functools.partial(_exact_gemm, make=rounding_gemm),
    ),
    Probe(
        "small_results",
        "gemm",
        "a sum that is rounded to the output type before its last scaling: small results lose bits or vanish",
        _EXACT_BLIND,
        functools.partial(_exact_gemm, make=small_results_gemm),
    ),
    Probe(
        "global_scale",
        "gemm",
        "a global scale that is rounded to fewer bits than fp32 has, as a loader may do",
        "faults that keep the sum and its scale",
        _global_scale,
    ),
    Probe(
        "realistic",
        "gemm",
        "errors above the derived bound, and a gain off by more than its own; outlier channels",
        "a single wrong code or scale among many: the bound must allow for every order of addition",
        _realistic,
    ),
    Probe(
        "exact_moe",
        "moe",
        "wrong expert, wrong router weight, gate and up swapped, any scale of another expert, dropped tokens, the expert offset",
        "errors of SiLU between -104 and 17, where it is not exact; gate and up global scales that differ; about one code in "
        "ten of the one hidden block that holds the answers, where requantisation absorbs the change",
        _exact_moe,
    ),
    Probe(
        "exact_moe_small",
        "moe",
        "as exact_moe, also for a kernel that adds partial sums up in bf16: they are below 2^8 units",
        "what narrow accumulators do to large sums; scales of the weights that are zero here",
        functools.partial(_exact_moe, small=True),
    ),
    Probe(
        "expert_number",
        "moe",
        "tokens answered by another expert, and by which one: each expert returns numbers of its own",
        "how several experts are weighed and added up",
        _expert_number,
    ),
    Probe(
        "exact_moe_split_scale",
        "moe",
        "a loader that keeps one global scale for a fused gate and up pair that has two",
        "as exact_moe; a kernel that takes one scale by design can only pass if its weight preparation folds the ratio",
        functools.partial(_exact_moe, ratio=4.0),
    ),
    Probe(
        "exact_moe_skewed",
        "moe",
        "a capacity that is exceeded, experts without a token: all tokens ask the same experts",
        "what the experts that nobody asks would answer",
        functools.partial(_exact_moe, skewed=True),
    ),
    Probe(
        "realistic_moe",
        "moe",
        "errors of SiLU's curve and of requantisation above the interval bound",
        "a single wrong code; anything as small as one flipped tie of the intermediate",
        _realistic_moe,
    ),
    Probe(
        "quantise_codes",
        "quantise",
        "any code or scale that no named convention gives: ties, zero and tiny blocks, overflowing scales, outliers",
        "whether the convention is the one that a checkpoint was made with",
        _quantise,
    ),
    *(
        Probe(
            relation.name,
            relation.op,
            relation.detects,
            "errors that are the same in both runs",
            functools.partial(_related, relation=relation),
        )
        for relation in RELATIONS
    ),
)
PROBES: dict[str, Probe] = {probe.name: probe for probe in _PROBES}


def find(name: str) -> Probe:
    """The probe of that name. Raises LabError listing the names."""
    if name not in PROBES:
        raise LabError(f"no probe {name!r}; there are {', '.join(PROBES)}")
    return PROBES[name]
