"""From params to cases: which backends, on which shapes, with which probes, called in which ways.

Every shape gets the probe that decides most (exact operands, poisoned output). The other probes ask about the kernel rather
than the shape, so they run at one shape of moderate size (for a kernel that adds up in another way at some shapes: at one of
each kind), unless probes are named: then all of them run at every shape.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from nvfp4lab.kernels import backends, probes
from nvfp4lab.kernels.backends.base import SPLIT_K_IN_BF16, Backend, adds_in_bf16
from nvfp4lab.kernels.case_models import Placed, model_shapes
from nvfp4lab.kernels.case_replays import REPLAYS
from nvfp4lab.kernels.cases import Case
from nvfp4lab.kernels.params import KernelParams
from nvfp4lab.kernels.probes import Probe
from nvfp4lab.kernels.shapes import GemmShape, MoeShape, QuantiseShape, Shape
from nvfp4lab.records import Target
from nvfp4lab.stack import here

DECISIVE = {"gemm": "exact_t24", "moe": "exact_moe", "quantise": "quantise_codes"}
# For a kernel that adds partial sums up in bf16 by design; what that costs, the probe above still says at one such shape.
DECISIVE_IN_BF16 = {"gemm": "exact_t8", "moe": "exact_moe_small"}
_TUNING = frozenset({"tactics", "autotune", "off_bucket"})  # depend on the shape; graphs and streams ask about the kernel
# Of the shape at which all probes run: relations between rows need some, lost and swapped blocks need several to show.
_FEWEST_ROWS, _WIDE = 16, 128


def cases(p: KernelParams, target: Target | None = None) -> tuple[Case, ...]:
    """All cases that the parameters ask for on `target` (default: this machine), each once.

    Without named backends: every kernel, and the CPU emulations only where there is no GPU. Raises LabError for an unknown
    name or an impossible split.
    """
    target = target or here()
    chosen = [backends.find(name) for name in p.kernel_backends]
    if not chosen:
        chosen = [
            one for one in backends.every().values() if target.cc == "cpu" or not one.name.startswith(("emulation.", "torch."))
        ]
    asked = [probes.find(name) for name in p.kernel_probes]
    placed = shapes(p)
    return tuple(dict.fromkeys(case for backend in chosen for case in _of_backend(p, backend, asked, placed, target)))


def shapes(p: KernelParams) -> tuple[Placed, ...]:
    """The shapes of all models, rows and splits asked for, each once; the first source names it."""
    split = itertools.product(p.kernel_models, p.kernel_tokens, p.kernel_tp, p.kernel_ep)
    placed = [one for model, tokens, tp, ep in split for one in model_shapes(model, tokens, tp, ep)]
    return tuple({one.shape: one for one in reversed(placed)}.values())[::-1]


def _of_backend(
    p: KernelParams, backend: Backend, asked: Sequence[Probe], placed: Sequence[Placed], target: Target
) -> Iterator[Case]:
    own = _extremes(placed) if backend.op == "quantise" else [one for one in placed if one.shape.op == backend.op]
    decisive = decisive_probe(backend)
    if not own:
        return
    if _hopeless(backend, target):  # one row holds its refusal, in its own words
        yield Case(backend.name, decisive.name, own[0].shape, source=own[0].source)
        return
    everywhere = [probe for probe in asked if _fits(probe, backend)] if asked else [decisive]
    for place, probe, seed in itertools.product(own, everywhere, range(p.kernel_seeds)):
        timed = p.kernel_timed and probe is decisive and backend.op != "quantise" and seed == 0
        yield Case(backend.name, probe.name, place.shape, seed, timed=timed, source=place.source)
    of_each_kind = [_moderate(alike) for alike in _kinds(backend, own)]
    if not asked:
        rest = [probe for probe in probes.PROBES.values() if _fits(probe, backend) and probe is not decisive]
        pairs = itertools.product(of_each_kind, rest)
        yield from (Case(backend.name, probe.name, place.shape, source=place.source) for place, probe in pairs)
    for variant in (one for one in p.kernel_variants if one in backend.variants):
        for place in own if variant in _TUNING else of_each_kind:
            yield Case(backend.name, decisive.name, place.shape, options=(("variant", variant),), source=place.source)
    if p.kernel_field_reports:
        replayed = (case for replay in REPLAYS for case in replay.cases(backend.name))
        yield from (
            dataclasses.replace(case, probe=decisive.name) if case.probe in DECISIVE.values() else case for case in replayed
        )


def decisive_probe(backend: Backend) -> Probe:
    """The exact probe that a sound kernel of this arithmetic passes and that leaves the fewest places to hide."""
    in_bf16 = SPLIT_K_IN_BF16 in backend.conventions
    return probes.find((DECISIVE_IN_BF16 if in_bf16 else DECISIVE)[backend.op])


def _fits(probe: Probe, backend: Backend) -> bool:
    return probe.op == backend.op and (backend.activations == "bf16" or not probe.weight_only)


def _hopeless(backend: Backend, target: Target) -> bool:
    """Not callable here, or FP4 arithmetic on a GPU before Blackwell, which has no tensor core for it."""
    if backend.is_available() is not None:
        return True
    return backend.arithmetic == "fp4" and target.cc != "cpu" and int(target.cc.split(".")[0]) < 10


def _extremes(placed: Sequence[Placed]) -> list[Placed]:
    """Of the quantisers' shapes the fewest and the most rows for each width: rows are independent of one another."""
    own = sorted((one for one in placed if isinstance(one.shape, QuantiseShape)), key=lambda one: (one.shape.k, one.shape.m))
    groups = [list(group) for _, group in itertools.groupby(own, key=lambda one: one.shape.k)]
    return [one for group in groups for one in dict.fromkeys((group[0], group[-1]))]


def _kinds(backend: Backend, own: Sequence[Placed]) -> list[list[Placed]]:
    """Shapes at which the backend adds up in the same way."""
    kinds: dict[bool, list[Placed]] = {}
    for one in own:
        kinds.setdefault(adds_in_bf16(backend, one.shape), []).append(one)
    return list(kinds.values())


def _moderate(own: Sequence[Placed]) -> Placed:
    """The smallest shape with enough rows and no narrow side; where none has both, with enough rows; else the largest."""
    rows = [one for one in own if (getattr(one.shape, "m", 0) or getattr(one.shape, "tokens", 0)) >= _FEWEST_ROWS]
    wide = [one for one in rows if _narrowest(one.shape) >= _WIDE]
    return min(wide or rows, key=lambda one: one.shape.flops) if rows else max(own, key=lambda one: one.shape.flops)


def _narrowest(shape: Shape) -> int:
    if isinstance(shape, MoeShape):
        return min(shape.hidden, shape.intermediate)
    return min(shape.n, shape.k) if isinstance(shape, GemmShape) else shape.k
