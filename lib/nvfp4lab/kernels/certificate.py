"""The certificate: would our gate notice a broken kernel, and does it leave sound ones alone?

Every fault is injected into a sound CPU kernel and put before the whole battery; so are sound kernels with nine orders
of addition. The published checks judge the same broken kernels on the data that their tests use (dense normal numbers).
A gate that misses a fault it should see, or blames a sound kernel, is not used: `Certificate.sound` is what callers ask.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable

from nvfp4lab import threads
from nvfp4lab.errors import LabError
from nvfp4lab.kernels import probes
from nvfp4lab.kernels.certificate_published import let_through, sound_kernel
from nvfp4lab.kernels.faults import Fault
from nvfp4lab.kernels.faults_gemm import GEMM_FAULTS
from nvfp4lab.kernels.faults_moe import MOE_FAULTS
from nvfp4lab.kernels.gates import GateResult
from nvfp4lab.kernels.probes import Experiment
from nvfp4lab.kernels.published import PUBLISHED, PublishedGate
from nvfp4lab.kernels.reference import LEGITIMATE_ORDERS
from nvfp4lab.kernels.shapes import GemmShape, MoeShape, Shape
from nvfp4lab.records import Evidence, Number, Stack, Target, Verdict, WrongKind

FAULTS: tuple[Fault, ...] = GEMM_FAULTS + MOE_FAULTS
SEEDS, QUICK_SEEDS = 200, 2  # for the false-alarm count
Progress = Callable[[Iterable, str], Iterable]  # (items, what they are) -> the same items, shown as they pass


def _silently(items: Iterable, what: str) -> Iterable:
    return items


@dataclasses.dataclass(frozen=True)
class Step:
    """One probe at one shape, with one seed."""

    probe: str
    shape: Shape
    seed: int = 0

    @property
    def label(self) -> str:
        return f"{self.probe} {self.shape.label}"


def _steps(shape: Shape, *names: str) -> tuple[Step, ...]:
    return tuple(Step(name, shape) for name in names)


# Tall and ragged, one row, one bucket in between, and a K that is no multiple of 64: faults that hide in one of them are
# the ones that were shipped.
BATTERY: tuple[Step, ...] = (
    *_steps(
        GemmShape(137, 144, 544), "exact_t8", "exact_t13", "exact_t24", "rounding", "small_results", "global_scale", "realistic"
    ),
    *_steps(GemmShape(1, 48, 272), "exact_t24"),
    *_steps(GemmShape(128, 64, 256), "exact_t24"),
    *_steps(
        GemmShape(37, 64, 272),
        "exact_t24",
        "row_permutation",
        "scale_doubling",
        "batch_invariance",
        "split_m",
        "repeat",
        "interleave",
    ),
    *_steps(
        MoeShape(33, 80, 96, 4, 2), "exact_moe", "exact_moe_small", "expert_number", "exact_moe_split_scale", "exact_moe_skewed"
    ),
    *_steps(MoeShape(21, 64, 64, 4, 2, 4, 16), "exact_moe"),
    *_steps(MoeShape(1, 64, 64, 4, 2), "exact_moe"),
    *_steps(MoeShape(48, 128, 96, 4, 2), "realistic_moe"),
    *_steps(
        MoeShape(19, 64, 64, 4, 2),
        "token_permutation",
        "token_batch_invariance",
        "expert_relabelling",
        "zero_expert",
        "moe_repeat",
        "moe_interleave",
    ),
)
FALSE_ALARM_STEPS: tuple[Step, ...] = (
    *_steps(
        GemmShape(19, 32, 144),
        "exact_t8",
        "exact_t13",
        "exact_t24",
        "exact_bf16",
        "rounding",
        "small_results",
        "global_scale",
        "realistic",
    ),
    *_steps(MoeShape(9, 64, 32, 4, 2), "exact_moe", "exact_moe_small", "realistic_moe"),
)


@dataclasses.dataclass(frozen=True)
class Kill:
    """What became of one fault. by: labels of the battery steps that killed it; tried: of all steps it was put before."""

    fault: Fault
    by: tuple[str, ...]
    tried: tuple[str, ...]

    @property
    def killed(self) -> bool:
        return bool(self.by)

    @property
    def needs(self) -> str:
        """What it takes to see this fault, from the steps that did."""
        if not self.by:
            return self.fault.indistinguishable or "nothing in the battery sees it"
        if self.by == self.tried:
            return "any probe"
        if len(self.by) <= 3:
            return "only " + ", ".join(self.by)
        names = sorted({label.split()[0] for label in self.by})
        return f"{len(self.by)} of {len(self.tried)} steps: {', '.join(names)}"


@dataclasses.dataclass(frozen=True)
class Certificate:
    """The kill matrix, the false alarms, and what each published check lets through."""

    kills: tuple[Kill, ...]
    trials: int
    false_alarms: tuple[str, ...]
    published: dict[str, tuple[str, ...]]
    seconds: float

    @property
    def judged(self) -> tuple[Kill, ...]:
        """The faults that a gate must see."""
        return tuple(kill for kill in self.kills if not kill.fault.indistinguishable)

    @property
    def survivors(self) -> tuple[str, ...]:
        return tuple(kill.fault.name for kill in self.judged if not kill.killed)

    @property
    def sound(self) -> bool:
        """Every fault killed that can be, none of the others blamed, no false alarm."""
        blamed = any(kill.killed for kill in self.kills if kill.fault.indistinguishable)
        return not self.survivors and not self.false_alarms and not blamed

    def evidence(self, target: Target, stack: Stack) -> Evidence:
        """The certificate as a ledger record of stage "gate"."""
        report = self.to_json()
        numbers = tuple(Number(name, report[name], "1") for name in ("total", "killed", "false_alarms", "trials"))
        reason = "" if self.sound else f"survivors: {', '.join(self.survivors) or 'none'}; {len(self.false_alarms)} false alarms"
        verdict, kind = (Verdict.OK, None) if self.sound else (Verdict.WRONG, WrongKind.DEGRADED)
        return Evidence("gate", "gate:lab", target, stack, verdict, "nvfp4lab certify", reason, kind, numbers, details=report)

    def to_json(self) -> dict:
        """The contract of `nvfp4lab certify --json`."""
        return {
            "total": len(self.judged),
            "killed": len(self.judged) - len(self.survivors),
            "false_alarms": len(self.false_alarms),
            "trials": self.trials,
            "faults": [
                {
                    "name": kill.fault.name,
                    "killed": kill.killed,
                    "by": list(kill.by),
                    "needs": kill.needs,
                    "op": kill.fault.op,
                    "source": kill.fault.source,
                }
                for kill in self.judged
            ],
            "published": {gate: list(names) for gate, names in self.published.items()},
            "indistinguishable": [
                {"name": kill.fault.name, "reason": kill.fault.indistinguishable, "survives": not kill.killed}
                for kill in self.kills
                if kill.fault.indistinguishable
            ],
            "false_alarm_examples": list(self.false_alarms[:10]),
            "sound": self.sound,
            "seconds": round(self.seconds, 2),
        }


def certify(
    seeds: int = SEEDS,
    faults: tuple[Fault, ...] = FAULTS,
    battery: tuple[Step, ...] = BATTERY,
    progress: Progress = _silently,
) -> Certificate:
    """Run it all on the CPU. seeds: for the false-alarm count; QUICK_SEEDS is the form that each kernel run repeats."""
    start = time.perf_counter()
    with threads.at_most(1):  # the matrices are tiny: on a busy machine two threads spend their time waiting for one another
        experiments = {step: probes.find(step.probe).build(step.shape, step.seed, "cpu") for step in battery}
        kills = tuple(Kill(fault, *_verdicts(fault, experiments)) for fault in progress(faults, "faults"))
        alarms, trials = count_false_alarms(seeds, progress)
        published = let_through(faults)
    return Certificate(kills, trials, alarms, published, time.perf_counter() - start)


def _verdicts(fault: Fault, experiments: dict[Step, Experiment]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(labels of the steps that do not say `ok`, of all steps). A fault with state gets a fresh kernel for each step."""
    own = {step: experiment for step, experiment in experiments.items() if probes.find(step.probe).op == fault.op}
    broken = (fault.inject(sound_kernel(fault.op)) for _ in own)
    by = tuple(
        step.label
        for (step, experiment), kernel in zip(own.items(), broken, strict=True)
        if experiment.judge(kernel).verdict is not Verdict.OK
    )
    return by, tuple(step.label for step in own)


def count_false_alarms(seeds: int, progress: Progress = _silently) -> tuple[tuple[str, ...], int]:
    """(sound kernels that were blamed, gate runs): every probe, every legitimate order, every seed."""
    alarms, trials = [], 0
    for seed in progress(range(seeds), "seeds"):
        for step in FALSE_ALARM_STEPS:
            probe = probes.find(step.probe)
            experiment = probe.build(step.shape, 1000 + seed, "cpu")
            for order in LEGITIMATE_ORDERS:
                result = experiment.judge(sound_kernel(probe.op, order))
                trials += 1
                if result.verdict is not Verdict.OK:
                    alarms.append(f"{step.label}, seed {1000 + seed}, {order.label}: {result.reason}")
    return tuple(alarms), trials


@dataclasses.dataclass(frozen=True)
class Story:
    """One fault told: what our gate said first, at which step, and which published checks let it through."""

    fault: Fault
    step: str
    verdict: GateResult
    passes: tuple[PublishedGate, ...]

    def __str__(self) -> str:
        names = ", ".join(f"{gate.name} ({gate.criterion})" for gate in self.passes) or "none"
        head = f"{self.fault.name} ({self.fault.source})"
        return f"{head}\n  this lab, {self.step}: {self.verdict.kind}: {self.verdict.reason}\n  let through by: {names}"


def story(name: str) -> Story:
    """Tell the fault of that name. Raises LabError if there is none."""
    fault = next((fault for fault in FAULTS if fault.name == name), None)
    if fault is None:
        raise LabError(f"no fault {name!r}; there are {', '.join(fault.name for fault in FAULTS)}")
    passed = let_through((fault,))
    for step in (step for step in BATTERY if probes.find(step.probe).op == fault.op):
        result = probes.find(step.probe).build(step.shape, step.seed, "cpu").judge(fault.inject(sound_kernel(fault.op)))
        if result.verdict is not Verdict.OK:
            break
    return Story(fault, step.label, result, tuple(gate for gate in PUBLISHED if passed[gate.name]))
