"""A kernel whose accumulator is narrower than the deciding probe asks is wrong there, and still has a speed worth knowing.

Whether a tensor core keeps 24 bits is the card's property, and all its kernels share it. Published measurements say that
Blackwell's keep them: 25 bits for FP8 on a B200 and more for FP4 (deepseek-ai/DeepGEMM #176), FP4 products to the bit on an
SM121 (modular/modular #6597); Hopper's keep 13 for FP8. Should a card keep fewer, its kernels fail the widest step of the
ladder at every shape. Those that pass a narrower one are then timed under it; the failure stays on record.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from nvfp4lab.kernels import controls
from nvfp4lab.kernels.cases import Case
from nvfp4lab.records import Verdict

LADDERS = (("exact_t24", "exact_t13", "exact_t8"), ("exact_moe", "exact_moe_small"))  # each step fits a narrower accumulator


def narrower(cases: Sequence[Case], verdicts: Mapping[Case, Verdict]) -> tuple[Case, ...]:
    """The timed cases that were wrong, each with the widest narrower probe that its kernel passed wherever it was asked.

    verdicts: of the cases run so far. A kernel of which no narrower probe is on record, or that fails them all, has none.
    """
    found = []
    for case in cases:
        if case.timed and verdicts.get(case) is Verdict.WRONG and not controls.is_control_name(case.backend):
            passed = (step for step in _below(case.probe) if _passes(case.backend, step, verdicts))
            found += [dataclasses.replace(case, probe=step) for step in (next(passed, None),) if step]
    return tuple(found)


def _below(probe: str) -> Sequence[str]:
    return next((ladder[ladder.index(probe) + 1 :] for ladder in LADDERS if probe in ladder), ())


def _passes(backend: str, probe: str, verdicts: Mapping[Case, Verdict]) -> bool:
    asked = {verdict for case, verdict in verdicts.items() if (case.backend, case.probe, case.options) == (backend, probe, ())}
    return asked == {Verdict.OK}
