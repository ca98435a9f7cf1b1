"""A yardstick is computed once for a checkpoint and its questions, and read back exactly."""

import dataclasses

import pytest

from nvfp4lab import params, stack
from nvfp4lab.records import Target
from nvfp4lab.server import arms_model, arms_reference, quality
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.quality import Floor, Reference
from nvfp4lab.server.quality_prompts import Prompt
from nvfp4lab.server.quality_reference import Item


def arm(model: str, **flags) -> Arm:
    return Arm(name="arm", model=model, **flags)


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

    def floor_of(reference, path, rounds_activations_of):
        calls.append(f"floor {path.name}" + (f" rounding for {rounds_activations_of.name}" if rounds_activations_of else ""))
        return Floor(str(path), ((0.25,),), ((True,),), (({3: -0.2, 4: -1.75},),))

    monkeypatch.setenv("NVFP4LAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(arms_model, "model_folder", folder)
    monkeypatch.setattr(quality, "prompts_for", lambda *size: [])
    monkeypatch.setattr(quality, "reference", reference)
    monkeypatch.setattr(quality, "floor_of", floor_of)
    return calls


def test_fixtures_know_their_reference_and_share_it(counted):
    p = params.check({}, "test")
    bf16, nvfp4 = (arms_reference.yardstick(arm(model), p) for model in ("smol-bf16", "smol-nvfp4"))
    assert counted == ["reference", "floor smol-bf16", "floor smol-nvfp4-dequantised"]
    assert bf16.reference == nvfp4.reference
    again = arms_reference.yardstick(arm("smol-nvfp4"), p)
    assert len(counted) == 3, "computed twice"
    assert dataclasses.asdict(again) == dataclasses.asdict(nvfp4), "not read back as written"


def test_other_questions_are_another_reference(counted):
    for values in ({}, {"quality_answer_tokens": 9}, {"quality_context_tokens": None}, {"canary_tokens": 3}):
        arms_reference.yardstick(arm("smol-bf16"), params.check(values, "test"))
    assert counted.count("reference") == 3


def test_a_checkpoint_of_the_user_needs_to_be_told_its_reference(counted):
    assert arms_reference.yardstick(arm("/models/mine"), params.check({}, "test")) is None
    p = params.check({"reference_model": "mine-bf16", "ideal_model": "mine-ideal"}, "test")
    assert arms_reference.yardstick(arm("mine"), p).reference.model.endswith("mine-bf16")
    assert counted == ["reference", "floor mine-ideal"]


@pytest.mark.parametrize(
    ("cc", "flags", "rounds"),
    [("12.0", {}, True), ("10.0", {"moe_runner_backend": "marlin"}, False), ("9.0", {}, False), ("cpu", {}, False)],
)
def test_a_native_fp4_arm_is_held_to_the_floor_with_rounded_activations(counted, monkeypatch, cc, flags, rounds):
    """Else a correct W4A4 kernel would be blamed for the rounding that its format prescribes."""
    monkeypatch.setattr(stack, "here", lambda: Target(cc))
    monkeypatch.setattr(Arm, "on_cpu", lambda self: cc == "cpu")
    arms_reference.yardstick(arm("smol-nvfp4", **flags), params.check({}, "test"))
    assert counted[-1] == "floor smol-nvfp4-dequantised" + (" rounding for smol-nvfp4" if rounds else "")
