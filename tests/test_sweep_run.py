"""A whole run: the certificate first, peaks where cases are timed, then the cases; nothing of it twice."""

import dataclasses
import shlex
import types

import pytest

import sweep_cases
from nvfp4lab.cli import main
from nvfp4lab.errors import LabError
from nvfp4lab.kernels import certificate, sweep_run
from nvfp4lab.kernels.cases import Case
from nvfp4lab.kernels.shapes import GemmShape
from nvfp4lab.kernels.sweep import Sweep
from nvfp4lab.params import Params
from nvfp4lab.records import Evidence, Ledger, Stack, Target, Verdict, WrongKind


def certified(verdict: Verdict):
    """Stands in for the certificate, which has its own tests."""
    kind, reason = (None, "") if verdict is Verdict.OK else (WrongKind.DEGRADED, "survivors: k_block_lost")

    def evidence(target, stack):
        return Evidence("gate", "gate:lab", target, stack, verdict, "nvfp4lab certify", reason, kind)

    return lambda seeds: types.SimpleNamespace(evidence=evidence)


@pytest.fixture
def p(tmp_path, monkeypatch):
    monkeypatch.setattr(certificate, "certify", certified(Verdict.OK))
    sweep = Sweep(Ledger(tmp_path / "ledger.jsonl"), tmp_path, Target("cpu", True), Stack(), run=sweep_cases.time_as_told)
    monkeypatch.setattr(sweep_run, "sweep_of", lambda p, target, stack: sweep)
    return Params(run_dir=str(tmp_path))


CASE = Case("reference", "fine", GemmShape(16, 64, 128), seed=1, timed=True)


def test_a_run_is_certified_then_measured_and_is_not_repeated(p, tmp_path):
    rows = list(sweep_run.collect(p, [CASE, CASE]))
    assert [row.subject for row in rows] == ["gate:lab", "peaks:cpu", CASE.subject]
    assert list(Ledger(tmp_path / "ledger.jsonl")) == rows
    peak, fraction = rows[1].number("peak_fp32_tflop_s").value, rows[2].number("roofline_fraction")
    assert peak > 0
    assert 0 < fraction.low < fraction.value < fraction.high < 1
    assert list(sweep_run.collect(p, [CASE])) == []


@pytest.mark.parametrize(
    ("cc", "backend", "asked"), [("9.0", "sglang.x", True), ("9.0", "flashinfer.x", False), ("cpu", "sglang.x", False)]
)
def test_what_sglang_imports_is_had_beforehand_where_it_is_called(p, monkeypatch, cc, backend, asked):
    wished = []
    on_cpu = sweep_run.sweep_of(p, Target("cpu", True), Stack())
    monkeypatch.setattr(sweep_run, "sweep_of", lambda *_: dataclasses.replace(on_cpu, target=Target(cc, True)))
    monkeypatch.setattr(Sweep, "__call__", lambda self, cases: wished.extend(self.wishes) or iter(()))
    list(sweep_run.collect(p, [Case(backend, "fine", GemmShape(16, 64, 128))]))
    assert wished == (list(sweep_run.SGLANG_IMPORTS) if asked else [])


def test_an_unsound_gate_judges_nothing(p, tmp_path, monkeypatch):
    monkeypatch.setattr(certificate, "certify", certified(Verdict.WRONG))
    with pytest.raises(LabError, match="no kernel was judged: survivors: k_block_lost"):
        list(sweep_run.collect(p, [CASE]))
    assert [row.subject for row in Ledger(tmp_path / "ledger.jsonl")] == ["gate:lab"]


def test_a_gpu_has_one_worker_whatever_the_parameters_say():
    p = Params(kernel_workers=4, kernel_timeout_s=7.0, kernel_memory_gib=2.0)
    on_cpu = sweep_run.sweep_of(p, Target("cpu", True), Stack())
    assert (on_cpu.workers, on_cpu.limits.timeout_s, on_cpu.limits.memory_bytes) == (4, 7.0, 2 << 30)
    assert sweep_run.sweep_of(p, Target("9.0", True), Stack()).workers == 1


def test_the_repro_line_of_a_record_repeats_its_case(tmp_path, monkeypatch, capsys):
    """Real cases through the command line: a sound kernel is ok, an fp16 accumulator is wrong, each by its own repro."""
    monkeypatch.setattr(certificate, "certify", certified(Verdict.OK))
    monkeypatch.chdir(tmp_path)
    shape = GemmShape(16, 64, 256)
    for backend, verdict, code in (("torch.reference_gemm", Verdict.OK, 0), ("emulation.gemm_float16", Verdict.WRONG, 1)):
        case = Case(backend, "exact_t24", shape)
        program, *arguments = shlex.split(case.repro)
        assert program == "nvfp4lab"
        assert main([*arguments, "--json"]) == code
        *_, row = (Evidence.from_json(line) for line in capsys.readouterr().out.splitlines())
        assert (row.subject, row.verdict, row.repro) == (case.subject, verdict, case.repro)
    assert [one.subject for one in Ledger("outputs/by_hand/ledger.jsonl") if one.stage == "kernel"][-1] == row.subject


def test_asked_again_the_command_says_what_is_recorded_and_runs_nothing(tmp_path, monkeypatch, capsys):
    """A script that asks twice gets the same rows and the same exit code."""
    monkeypatch.setattr(certificate, "certify", certified(Verdict.OK))
    (tmp_path / "p.yaml").write_text(
        f"run_dir: {tmp_path}\nkernel_backends: [emulation.gemm_float16]\nkernel_tokens: [16]\n"
        "kernel_probes: [exact_t8, exact_t24]\nkernel_field_reports: false\nnotebooks: [22_gemm_kernels]\n"
    )
    asked = ["kernels", str(tmp_path / "p.yaml"), "--json", "--only", "m16n512k128"]
    found = []
    for _ in range(2):
        assert main(asked) == 1
        rows = [Evidence.from_json(line) for line in capsys.readouterr().out.splitlines()]
        found.append({(row.subject, row.verdict) for row in rows if row.stage == "kernel"})
    assert found[0] == found[1] and {verdict for _, verdict in found[0]} == {Verdict.OK, Verdict.WRONG}
    assert len([row for row in Ledger(tmp_path / "ledger.jsonl") if row.stage == "kernel"]) == 2
    assert main(asked[:2] + asked[3:]) == 1
    assert capsys.readouterr().out.count("recorded before: gemm:emulation.gemm_float16") == 2
