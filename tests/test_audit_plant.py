"""Planting: it must not touch the original, the trial must fail when the audit is blind, evidence must tell the kinds apart."""

import hashlib
from pathlib import Path

import pytest

from audit_synthesis import llama, qwen3_moe
from nvfp4lab.errors import LabError
from nvfp4lab.nvfp4 import audit_evidence, audit_plant, audit_plots
from nvfp4lab.nvfp4.audit import audit
from nvfp4lab.records import Evidence, Verdict, WrongKind

FEW = audit_plant.FAULTS[:1] + audit_plant.FAULTS[4:6]  # the synthetic model has three layers


def digests(directory: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in directory.iterdir()}


def test_trial_finds_what_it_planted_and_leaves_the_original_alone(tmp_path: Path) -> None:
    directory = llama().write(tmp_path / "model")
    before = digests(directory)
    trial = audit_plant.trial(directory, tmp_path / "copy", FEW)
    assert trial.passed and set(trial.planted) == {fault.kind for fault in FEW} and len(set(trial.planted.values())) == 3
    assert digests(directory) == before and not (tmp_path / "copy").exists()
    record = audit_evidence.evidence_of_trial(trial, "llama")
    assert record.verdict is Verdict.OK and record.number("planted").value == record.number("found").value == 3


def test_a_blind_audit_fails_the_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = llama().write(tmp_path / "model")
    clean = audit(directory)
    monkeypatch.setattr(audit_plant, "audit", lambda _directory: clean)
    trial = audit_plant.trial(directory, tmp_path / "copy", FEW)
    assert not trial.passed and trial.found == frozenset()
    record = audit_evidence.evidence_of_trial(trial, "llama")
    assert record.verdict is Verdict.WRONG and "missed" in record.reason and "block_scale_nan" in record.reason


def test_planting_refuses_links_and_existing_folders(tmp_path: Path) -> None:
    directory = llama().write(tmp_path / "model")
    with pytest.raises(LabError, match="is there already"):
        audit_plant.trial(directory, directory, FEW)
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in directory.iterdir():
        (linked / path.name).symlink_to(path)
    before = digests(directory)
    with pytest.raises(LabError, match="is a link"):
        audit_plant.plant(linked, FEW)
    assert digests(directory) == before
    with pytest.raises(LabError, match="left to plant"):
        audit_plant.trial(directory, tmp_path / "copy", audit_plant.FAULTS)
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    ("tensor", "value", "kind"),
    [("input_scale", float("nan"), WrongKind.NAN), ("weight_scale_2", 0.5, WrongKind.GARBAGE), (None, None, None)],
)
def test_evidence_of_an_audit(tensor: str | None, value: float | None, kind: WrongKind | None, tmp_path: Path) -> None:
    model = qwen3_moe()
    if tensor:
        model.scalar(f"model.layers.1.mlp.experts.2.up_proj.{tensor}", value)
    report = audit(model.write(tmp_path))
    record = audit_evidence.evidence(report, "tiny")
    assert record.kind is kind and record.stage == "checkpoint"
    assert Evidence.from_json(record.to_json()).details["moot_flags"].keys() == {"--speculative-algorithm NEXTN"}
    assert record.number("fp4_routed_expert_layers").value == 36
    assert len(report.findings) == (1 if tensor else 0)
    assert audit_evidence.findings_table(report).count("<tr>") == 1 + len(report.findings)
    for picture in (audit_plots.layers(report), audit_plots.findings(report)):
        picture.canvas.draw()
        assert picture.axes
