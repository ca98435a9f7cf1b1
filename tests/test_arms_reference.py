"""A yardstick is computed once for a checkpoint and its questions, and read back exactly."""

import dataclasses

import pytest

from nvfp4lab import params
from nvfp4lab.server import arms_model, arms_reference, quality
from nvfp4lab.server.quality import Floor, Reference
from nvfp4lab.server.quality_prompts import Prompt
from nvfp4lab.server.quality_reference import Item


@pytest.fixture
def counted(monkeypatch, tmp_path):
    """Folders instead of checkpoints, and stand-ins for the two costly steps that count their calls."""
    calls = []
    item = Item(Prompt("p", "english", "x", (1, 2)), (3,), "y", ({3: -0.1, 4: -2.5},))

    def folder(name: str):
        made = tmp_path / name
        if not made.exists():
            made.mkdir()
            (made / "model.safetensors").touch()
        return made

    def reference(path, prompts, tokens):
        calls.append("reference")
        return Reference(str(path), (item,), (0,))

    def floor_of(reference, path):
        calls.append(f"floor {path.name}")
        return Floor(str(path), ((0.25,),), ((True,),), (({3: -0.2, 4: -1.75},),))

    monkeypatch.setenv("NVFP4LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(arms_model, "model_folder", folder)
    monkeypatch.setattr(quality, "prompts_for", lambda *size: [])
    monkeypatch.setattr(quality, "reference", reference)
    monkeypatch.setattr(quality, "floor_of", floor_of)
    return calls


def test_fixtures_know_their_reference_and_share_it(counted):
    p = params.check({}, "test")
    bf16, nvfp4 = (arms_reference.yardstick(model, p) for model in ("smol-bf16", "smol-nvfp4"))
    assert counted == ["reference", "floor smol-bf16", "floor smol-nvfp4-dequantised"]
    assert bf16.reference == nvfp4.reference
    again = arms_reference.yardstick("smol-nvfp4", p)
    assert len(counted) == 3, "computed twice"
    assert dataclasses.asdict(again) == dataclasses.asdict(nvfp4), "not read back as written"


def test_other_questions_are_another_reference(counted):
    for values in ({}, {"quality_answer_tokens": 9}, {"quality_context_tokens": None}, {"canary_tokens": 3}):
        arms_reference.yardstick("smol-bf16", params.check(values, "test"))
    assert counted.count("reference") == 3


def test_a_checkpoint_of_the_user_needs_to_be_told_its_reference(counted):
    assert arms_reference.yardstick("/models/mine", params.check({}, "test")) is None
    p = params.check({"reference_model": "mine-bf16", "ideal_model": "mine-ideal"}, "test")
    assert arms_reference.yardstick("mine", p).reference.model.endswith("mine-bf16")
    assert counted == ["reference", "floor mine-ideal"]
