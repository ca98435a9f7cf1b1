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

    verdicts: of all cases on record, `cases` among them. A kernel that passed the deciding probe at any shape has an accumulator
    wide enough, and its failure elsewhere is another fault; one that passed no narrower probe is just wrong. Neither is timed.
    """
    found = []
    for case in cases:
        is_narrow = verdicts.get(case) is Verdict.WRONG and _asked(case.backend, case.probe, verdicts) == {Verdict.WRONG}
        if not case.timed or not is_narrow or controls.is_control_name(case.backend):
            continue
        passed = (step for step in _below(case.probe) if _asked(case.backend, step, verdicts) == {Verdict.OK})
        found += [dataclasses.replace(case, probe=step) for step in (next(passed, None),) if step]
    return tuple(found)


def _below(probe: str) -> Sequence[str]:
    return next((ladder[ladder.index(probe) + 1 :] for ladder in LADDERS if probe in ladder), ())


def _asked(backend: str, probe: str, verdicts: Mapping[Case, Verdict]) -> set[Verdict]:
    """What came of asking this, called as it is: refusals of single shapes aside."""
    told = {verdict for case, verdict in verdicts.items() if (case.backend, case.probe, case.options) == (backend, probe, ())}
    return told - {Verdict.UNSUPPORTED, Verdict.OOM, Verdict.NOT_RUN}
