"""What an arm is held to: the reference model's own distributions and the loss that its number format costs anyway.

Fixture models know theirs. For another checkpoint the params name a bf16 model (`reference_model`) and, for NVFP4, its
dequantised weights (`ideal_model`); without them an arm is compared with the first arm only. Both are computed on this
machine's CPU and kept in the lab's cache, keyed by everything that they depend on.
"""

import contextlib
import dataclasses
import hashlib
import io
import json
from pathlib import Path

from nvfp4lab import atomic, stack
from nvfp4lab.params import Params
from nvfp4lab.server import arms_model, quality, quality_reference
from nvfp4lab.server.arms import Arm
from nvfp4lab.server.quality import Floor, Reference
from nvfp4lab.source.fetch import cache_dir


@dataclasses.dataclass(frozen=True)
class Yardstick:
    """Reference and floor of one arm."""

    reference: Reference
    floor: Floor


def yardstick(arm: Arm, p: Params) -> Yardstick | None:
    """The yardstick of `arm`; None when nobody says what its reference is.

    A native FP4 kernel rounds activations as well: its floor is that of the ideal weights with rounded activations.
    """
    names = _reference_names(arm.model, p)
    if names is None:
        return None
    reference_folder, ideal_folder = map(arms_model.model_folder, names)
    key = _key(reference_folder, p)
    path = cache_dir() / "references" / f"{key}.json"
    if path.exists():
        reference = quality_reference.load_reference(path)
    else:
        print(f"{names[0]}: computing the reference's answers on the CPU, once")
        size = (p.quality_answer_tokens, p.quality_context_tokens, p.quality_prompts_per_category)
        with contextlib.redirect_stderr(io.StringIO()):  # progress bars of the libraries, which no report needs
            prompts = quality.prompts_for(reference_folder, *size)
            reference = quality.reference(reference_folder, prompts, p.quality_answer_tokens)
        atomic.replace(path, json.dumps(dataclasses.asdict(reference)))  # two notebooks may compute the same at once
    rounds = names[1] != names[0] and arm.rounds_activations(stack.here().cc)
    kind = "w4a4" if rounds else "w4a16"
    floor_path = path.with_name(f"{key}-{_key(ideal_folder, p)}.{kind}.floor.json")
    return Yardstick(reference, _floor(reference, ideal_folder, floor_path, arms_model.model_folder(arm.model) if rounds else None))


def _reference_names(model: str, p: Params) -> tuple[str, str] | None:
    """(reference, ideal). All fixtures compute the function of the smallest, which is therefore the reference of all."""
    from nvfp4lab.nvfp4 import fixtures  # torch

    if p.reference_model is not None:
        return p.reference_model, p.ideal_model or p.reference_model
    if model not in fixtures.FIXTURES:
        return None
    ideal = fixtures.reference_of(model)
    return "smol-bf16", ideal if ideal.endswith("dequantised") else "smol-bf16"


def _floor(reference: Reference, ideal_folder: Path, path: Path, rounds_activations_of: Path | None) -> Floor:
    if path.exists():
        return _read_floor(path)
    with contextlib.redirect_stderr(io.StringIO()):
        floor = quality.floor_of(reference, ideal_folder, rounds_activations_of)
    atomic.replace(path, json.dumps(dataclasses.asdict(floor)))
    return floor


def _read_floor(path: Path) -> Floor:
    raw = json.loads(path.read_text(encoding="utf-8"))
    rows = tuple(tuple({int(token): value for token, value in row.items()} for row in item) for item in raw["rows"])
    return Floor(raw["model"], tuple(map(tuple, raw["kl_nats"])), tuple(map(tuple, raw["agrees"])), rows)


def _key(folder: Path, p: Params) -> str:
    """Changes with the checkpoint, the questions, or the code that asks them."""
    weights = sorted((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in folder.glob("*.safetensors"))
    here = Path(__file__).parent
    sources = [*here.glob("quality_reference.py"), *here.glob("quality_prompts.py"), *sorted((here / "prompts").iterdir())]
    size = (p.quality_answer_tokens, p.quality_context_tokens, p.quality_prompts_per_category)
    told = repr((str(folder), weights, size, [file.read_bytes() for file in sources]))
    return hashlib.sha256(told.encode()).hexdigest()[:16]
