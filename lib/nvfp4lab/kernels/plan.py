"""From params to cases: which backends, on which shapes, with which probes, called in which ways."""

import itertools
from collections.abc import Iterator

from nvfp4lab.kernels import backends, probes
from nvfp4lab.kernels.backends.base import Backend
from nvfp4lab.kernels.case_models import Placed, model_shapes
from nvfp4lab.kernels.case_replays import REPLAYS
from nvfp4lab.kernels.cases import Case, Option
from nvfp4lab.kernels.params import KernelParams
from nvfp4lab.kernels.probes import Probe

# Probes that one failure or one pass at a time says most about come first; the relations follow.
_FIRST = ("exact_t24", "exact_moe", "quantise_codes")
_TIMED = frozenset(_FIRST)


def cases(p: KernelParams) -> tuple[Case, ...]:
    """All cases that the parameters ask for, each once. Raises LabError for an unknown name or an impossible split."""
    chosen = [backends.find(name) for name in p.kernel_backends] or list(backends.every().values())
    asked = [probes.find(name) for name in p.kernel_probes] or sorted(
        probes.PROBES.values(), key=lambda probe: probe.name not in _FIRST
    )
    found = [case for backend in chosen for case in _of_backend(p, backend, asked)]
    return tuple(dict.fromkeys(found))


def _of_backend(p: KernelParams, backend: Backend, asked: list[Probe]) -> Iterator[Case]:
    fitting = [probe for probe in asked if probe.op == backend.op and (backend.activations == "bf16" or not probe.weight_only)]
    placed = [one for one in shapes(p) if one.shape.op == backend.op]
    if backend.is_available() is not None and placed and fitting:  # one row that says why is enough
        yield Case(backend.name, fitting[0].name, placed[0].shape, source=placed[0].source)
        return
    for place, probe, seed in itertools.product(placed, fitting, range(p.kernel_seeds)):
        timed = p.kernel_timed and probe.name in _TIMED and backend.op != "quantise" and seed == 0
        yield Case(backend.name, probe.name, place.shape, seed, timed=timed, source=place.source)
    decisive = next((probe for probe in fitting if probe.name in _FIRST), None)
    for place, variant in itertools.product(placed, [one for one in p.kernel_variants if one in backend.variants]):
        options: tuple[tuple[str, Option], ...] = (("variant", variant),)
        if decisive is not None:
            yield Case(backend.name, decisive.name, place.shape, options=options, source=place.source)
    if p.kernel_field_reports:
        yield from (case for replay in REPLAYS for case in replay.cases(backend.name))


def shapes(p: KernelParams) -> tuple[Placed, ...]:
    """The shapes of all models, rows and splits asked for, each once; the first source names it."""
    split = itertools.product(p.kernel_models, p.kernel_tokens, p.kernel_tp, p.kernel_ep)
    placed = [one for model, tokens, tp, ep in split for one in model_shapes(model, tokens, tp, ep)]
    return tuple({one.shape: one for one in reversed(placed)}.values())[::-1]
