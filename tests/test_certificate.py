"""The certificate itself can fail: a weakened gate, a missing probe or a blamed sound kernel shows."""

import dataclasses
import json

import pytest
import torch
from nvfp4lab.cli import main
from nvfp4lab.kernels import certificate, gates
from nvfp4lab.kernels.certificate import BATTERY, FAULTS, Step, certify
from nvfp4lab.kernels.gates import GateResult
from nvfp4lab.kernels.reference import LEGITIMATE_ORDERS, Order
from nvfp4lab.kernels.shapes import GemmShape
from nvfp4lab.records import Verdict


@pytest.fixture(scope="module")
def quick():
    return certify(seeds=1)


def named(*names: str):
    found = tuple(fault for fault in FAULTS if fault.name in names)
    assert len(found) == len(names)
    return found


def test_our_gate_is_sound(quick):
    assert quick.sound and not quick.survivors and not quick.false_alarms
    assert quick.trials == len(LEGITIMATE_ORDERS) * len(certificate.FALSE_ALARM_STEPS) and len(LEGITIMATE_ORDERS) == 9


def test_a_loosened_gate_is_found_out(monkeypatch):
    """The published cosine test in the place of our gate."""

    def cosine(actual, expected, experts=None):
        same = torch.nn.functional.cosine_similarity(actual.double().flatten(), expected.double().flatten(), dim=0) > 0.97
        return GateResult(Verdict.OK) if same else GateResult(Verdict.WRONG, "cosine", gates.WrongKind.GARBAGE)

    monkeypatch.setattr(gates, "exact", cosine)
    monkeypatch.setattr(gates, "within", lambda actual, expected, tolerance, experts=None: cosine(actual, expected))
    weak = certify(seeds=1, faults=named("alpha x 5.0", "one value off by one ulp", "all NaN"))
    assert set(weak.survivors) == {"alpha x 5.0", "one value off by one ulp"} and not weak.sound


@pytest.mark.parametrize(
    ("without", "survivor"),
    [
        ("rounding", "ties rounded away from zero"),
        ("repeat", "race in one tile, one call in 5"),
        ("exact_moe_split_scale", "gate and up global scales merged"),
        ("realistic_moe", "GELU for SiLU"),
    ],
)
def test_each_probe_is_needed(without, survivor):
    battery = tuple(step for step in BATTERY if step.probe != without)
    assert certify(seeds=0, faults=named(survivor), battery=battery).survivors == (survivor,)


def test_a_single_shape_would_not_do():
    battery = (Step("exact_t24", GemmShape(128, 64, 256)),)
    hidden = ("wrong for M = 1 only", "rows past 128 zero unless M is a multiple of 128", "K tail past a multiple of 64 dropped")
    assert set(certify(seeds=0, faults=named(*hidden), battery=battery).survivors) == set(hidden)


def test_a_blamed_sound_kernel_is_a_false_alarm(monkeypatch):
    monkeypatch.setattr(certificate, "LEGITIMATE_ORDERS", (Order("blocked", 16, torch.bfloat16),))
    alarms, trials = certificate.count_false_alarms(1)
    assert trials == len(certificate.FALSE_ALARM_STEPS) and any("exact_t24" in alarm for alarm in alarms)


def test_a_fault_that_cannot_be_told_is_named_and_survives(quick):
    named_so = {kill.fault.name: kill for kill in quick.kills if kill.fault.indistinguishable}
    assert "another order of addition" in named_so
    assert not any(kill.killed for kill in named_so.values())
    blaming = dataclasses.replace(quick, kills=tuple(dataclasses.replace(kill, by=("x",)) for kill in quick.kills))
    assert not blaming.sound


@pytest.mark.parametrize(
    ("gate", "fault"),
    [
        ("fi mm_fp4", "alpha x 5.0"),
        ("fi mm_fp4", "tile 128x16 zeroed"),
        ("fi grouped_mm", "scales shifted by one block"),
        ("fi-bench", "all NaN"),
        ("fi moe utils", "one NaN in the MoE output"),
        ("sgl/vllm dense", "alpha x 1.01"),
    ],
)
def test_published_checks_let_through_what_was_measured(quick, gate, fault):
    assert fault in quick.published[gate]


@pytest.mark.parametrize(
    ("gate", "fault"), [("fi mm_fp4", "all NaN"), ("sgl/vllm dense", "alpha x 1.5"), ("fi mm_fp4", "nibbles swapped")]
)
def test_published_checks_catch_what_was_measured(quick, gate, fault):
    assert fault not in quick.published[gate]


def test_certify_quick_prints_its_contract(capsys):
    assert main(["certify", "--quick", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["killed"] == report["total"] >= 30 and report["false_alarms"] == 0 and report["trials"] > 0
    assert {"name", "killed", "by", "needs"} <= set(report["faults"][0])
    assert set(report["published"]) == {gate.name for gate in certificate.PUBLISHED}
