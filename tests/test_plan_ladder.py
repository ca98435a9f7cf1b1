"""A kernel whose accumulator is narrower than the deciding probe asks gets its times under the widest probe that it passes."""

import dataclasses
from pathlib import Path

import pytest

from nvfp4lab.kernels import backends, controls, plan_ladder, sweep_run
from nvfp4lab.kernels.cases import Case
from nvfp4lab.kernels.shapes import GemmShape, MoeShape
from nvfp4lab.kernels.sweep import latest
from nvfp4lab.params import Params
from nvfp4lab.records import Ledger, Verdict
from nvfp4lab.stack import capture

KERNEL, WIDE, TALL, ODD = "flashinfer.mm_fp4.cutlass", GemmShape(16, 256, 512), GemmShape(1, 512, 256), GemmShape(3, 48, 80)
OK, WRONG = Verdict.OK, Verdict.WRONG


def timed(shape=WIDE, backend=KERNEL, probe="exact_t24") -> Case:
    return Case(backend, probe, shape, timed=True)


def rungs(t13: Verdict, t8: Verdict, backend=KERNEL, shape=WIDE) -> dict[Case, Verdict]:
    return {Case(backend, "exact_t13", shape): t13, Case(backend, "exact_t8", shape): t8}


@pytest.mark.parametrize(
    ("t24", "t13", "t8", "probe"),
    [
        (OK, OK, OK, None),
        (WRONG, OK, OK, "exact_t13"),
        (WRONG, WRONG, OK, "exact_t8"),
        (WRONG, WRONG, WRONG, None),
        (Verdict.CRASH, OK, OK, None),
        (Verdict.UNSUPPORTED, OK, OK, None),
        (Verdict.NOT_RUN, OK, OK, None),
    ],
)
def test_the_widest_narrower_probe_that_passed_is_timed(t24, t13, t8, probe):
    found = plan_ladder.narrower([timed()], {timed(): t24} | rungs(t13, t8))
    assert found == ((dataclasses.replace(timed(), probe=probe),) if probe else ())


def test_every_shape_of_a_narrow_kernel_is_timed_and_none_that_it_refuses():
    cases = [timed(), timed(TALL), timed(ODD)]
    verdicts = {timed(): WRONG, timed(TALL): WRONG, timed(ODD): Verdict.UNSUPPORTED} | rungs(OK, OK)
    assert plan_ladder.narrower(cases, verdicts) == (timed(probe="exact_t13"), timed(TALL, probe="exact_t13"))


def test_a_kernel_that_was_right_somewhere_is_not_narrow_but_wrong_elsewhere():
    assert plan_ladder.narrower([timed(), timed(TALL)], {timed(): WRONG, timed(TALL): OK} | rungs(OK, OK)) == ()


def test_a_probe_that_failed_anywhere_is_not_passed():
    verdicts = {timed(): WRONG} | rungs(OK, OK) | {Case(KERNEL, "exact_t13", TALL): WRONG}
    assert plan_ladder.narrower([timed()], verdicts) == (timed(probe="exact_t8"),)


def test_what_another_kernel_or_another_way_of_calling_passed_says_nothing():
    in_a_graph = Case(KERNEL, "exact_t13", WIDE, options=(("variant", "cuda_graph"),))
    verdicts = {timed(): WRONG, in_a_graph: OK} | rungs(OK, OK, backend="flashinfer.mm_fp4.cudnn")
    assert plan_ladder.narrower([timed()], verdicts) == ()


def test_untimed_cases_and_controls_are_left_alone():
    control = timed(backend="emulation.gemm_bfloat16")
    assert controls.is_control_name(control.backend) and control.backend in backends.every()
    untimed = dataclasses.replace(timed(), timed=False)
    verdicts = {untimed: WRONG, control: WRONG} | rungs(OK, OK) | rungs(OK, OK, backend=control.backend)
    assert plan_ladder.narrower([untimed, control], verdicts) == ()


def test_a_fused_moe_has_a_ladder_too():
    shape = MoeShape(16, 256, 128, 8, 2)
    case = Case("flashinfer.cutlass_fused_moe", "exact_moe", shape, timed=True)
    small = Case(case.backend, "exact_moe_small", shape)
    assert plan_ladder.narrower([case], {case: WRONG, small: OK}) == (dataclasses.replace(small, timed=True),)
    assert plan_ladder.narrower([small], {small: WRONG}) == ()


def added_to(p: Params, cases: list[Case]) -> tuple[Case, ...]:
    """What the run's ledger makes the ladder add."""
    return sweep_run.narrower(cases, latest(Ledger(Path(p.run_dir) / "ledger.jsonl")), capture())


def test_a_real_kernel_of_eight_bits_is_wrong_and_has_a_time(tmp_path, monkeypatch):
    """The bf16 emulation, for once not as a control: wrong at 2^24 and 2^13 units, timed at 2^8, and nothing of it twice."""
    monkeypatch.setattr(controls, "is_control_name", lambda backend: False)
    p, name = Params(run_dir=str(tmp_path)), "emulation.gemm_bfloat16"
    cases = [timed(backend=name), *rungs(OK, OK, backend=name)]
    made = list(sweep_run.collect(p, cases))
    assert [row.subject for row in made].count("gate:lab") == [row.subject for row in made].count("peaks:cpu") == 1
    rows = {row.subject: row for row in made if not row.number("median_ms")}
    of = {case.probe: rows[case.subject] for case in cases}
    assert (of["exact_t24"].verdict, of["exact_t13"].verdict) == (WRONG, WRONG)
    assert not of["exact_t24"].numbers or of["exact_t24"].number("median_ms") is None
    (added,) = added_to(p, cases)
    assert (added.probe, added.timed) == ("exact_t8", True)
    told = sweep_run.recorded(p, cases)
    assert len(told) == 4 and told[-1].verdict is OK and told[-1].number("median_ms").value > 0
    assert list(sweep_run.collect(p, cases)) == []
    other = next(row for row in told if row.subject == cases[0].subject)
    details = dict(other.details) | {"case_hash": "0" * 16}
    Ledger(tmp_path / "ledger.jsonl").append(dataclasses.replace(other, verdict=OK, kind=None, reason="", details=details))
    assert added_to(p, cases[:1]) == (added,), "what was right under another stack is another kernel"
    assert added_to(p, cases[:1]) == (added,), "the rungs are on record, whether asked for again or not"
