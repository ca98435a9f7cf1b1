"""What the right answers are: the reference model's own distributions, and what NVFP4 alone makes of them.

    ref   = reference("smol-padded-bf16 folder", prompts)      # fp32 arithmetic, teacher-forced on its greedy answers
    floor = floor_of(ref, "smol-nvfp4-dequantised folder")     # the same tokens, ideal NVFP4 weights, bf16 arithmetic

The floor is the loss that the number format (and bf16 arithmetic) costs with a perfect kernel; for a bf16 arm it is the
reference's own weights in bf16 arithmetic. An arm is judged against it, never against zero.
"""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nvfp4lab.errors import LabError
from nvfp4lab.server import quality_prompts
from nvfp4lab.server.quality_distance import Row, cut, kl_nats, top1
from nvfp4lab.server.quality_prompts import Prompt

REFERENCE_TOP = 64  # tokens kept of each of the reference's distributions
SERVER_TOP = 20  # tokens asked of a server


@dataclasses.dataclass(frozen=True)
class Item:
    """One prompt with the reference's greedy answer; rows[j] is its distribution of answer token j."""

    prompt: Prompt
    answer_ids: tuple[int, ...]
    answer_text: str
    rows: tuple[Row, ...]


@dataclasses.dataclass(frozen=True)
class Reference:
    """The reference's answers. model: the folder it came from; eos_ids: tokens that end an answer."""

    model: str
    items: tuple[Item, ...]
    eos_ids: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Floor:
    """The loss of ideal weights, by item and position of the reference. kl_nats: KL(reference || ideal); agrees: same top-1."""

    model: str
    kl_nats: tuple[tuple[float, ...], ...]
    agrees: tuple[tuple[bool, ...], ...]
    rows: tuple[tuple[Row, ...], ...]

    @classmethod
    def of(cls, model: str, ref: Reference, rows: Sequence[Sequence[Row]]) -> "Floor":
        """The floor of a model whose distributions at the reference's positions are `rows`, by item."""
        pairs = [list(zip(item.rows, ours, strict=True)) for item, ours in zip(ref.items, rows, strict=True)]
        return cls(
            model,
            tuple(tuple(kl_nats(expected, ours) for expected, ours in item) for item in pairs),
            tuple(tuple(top1(expected) == top1(ours) for expected, ours in item) for item in pairs),
            tuple(map(tuple, rows)),
        )


def load_reference(path: Path | str) -> Reference:
    """The reference in a file that holds its `dataclasses.asdict` as JSON."""
    raw = json.loads(Path(path).read_text(encoding="utf-8"))

    def item(row: dict) -> Item:
        prompt = Prompt(**row["prompt"] | {"token_ids": tuple(row["prompt"]["token_ids"])})
        rows = tuple({int(token): value for token, value in entries.items()} for entries in row["rows"])
        return Item(prompt, tuple(row["answer_ids"]), row["answer_text"], rows)

    return Reference(raw["model"], tuple(map(item, raw["items"])), tuple(raw["eos_ids"]))


def prompts_for(model_dir: Path | str, answer_tokens: int = 24, context_tokens: int | None = None, per_category: int | None = None):
    """The committed prompt set in the tokens of the model in `model_dir`; context_tokens: at most, default its window."""
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(model_dir).get_text_config()
    window = min(context_tokens or config.max_position_embeddings, config.max_position_embeddings)
    return quality_prompts.load(AutoTokenizer.from_pretrained(model_dir), window, answer_tokens, per_category)


def reference(model_dir: Path | str, prompts: Sequence[Prompt], answer_tokens: int = 24) -> Reference:
    """Greedy answers of at most `answer_tokens` and their distributions, in fp32 on this machine's CPU.

    Seconds for a 135M model and short prompts; a long prompt costs about a second per 1,000 tokens and core.
    """
    import torch
    from transformers import AutoTokenizer

    model, tokenizer = _load(model_dir, torch.float32), AutoTokenizer.from_pretrained(model_dir)
    eos = model.generation_config.eos_token_id
    eos_ids = tuple(eos) if isinstance(eos, list) else (eos,)
    items = []
    for prompt in prompts:
        with torch.inference_mode():
            ids = torch.tensor([prompt.token_ids])
            generated = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=answer_tokens, do_sample=False)
        answer = tuple(generated[0, ids.shape[1] :].tolist())
        rows = _teacher_forced(model, prompt.token_ids, answer, REFERENCE_TOP)
        items.append(Item(prompt, answer, tokenizer.decode(answer, skip_special_tokens=True), rows))
    return Reference(str(model_dir), tuple(items), eos_ids)


def floor_of(ref: Reference, ideal_dir: Path | str, rounds_activations_of: Path | str | None = None) -> Floor:
    """The floor: the model in `ideal_dir` in bf16 on the reference's tokens.

    rounds_activations_of: the NVFP4 checkpoint that it was dequantised from, to have the inputs of its FP4 layers rounded
    as W4A4 backends do; without it the floor is that of W4A16 (Marlin).
    """
    import torch

    model = _load(ideal_dir, torch.bfloat16)
    if rounds_activations_of is not None:
        from nvfp4lab.server.quality_activations import round_activations

        round_activations(model, rounds_activations_of)
    rows = [_teacher_forced(model, item.prompt.token_ids, item.answer_ids, SERVER_TOP) for item in ref.items]
    return Floor.of(str(ideal_dir), ref, rows)


def _load(model_dir: Path | str, dtype: Any):
    from transformers import AutoModelForCausalLM

    if not (Path(model_dir) / "config.json").is_file():
        raise LabError(f"{model_dir}: no config.json; the reference needs a bf16 or dequantised checkpoint folder")
    config = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization_config"):
        raise LabError(f"{model_dir}: is quantised; transformers needs its bf16 original or its dequantised weights")
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype).eval()


def _teacher_forced(model: Any, prompt_ids: Sequence[int], answer_ids: Sequence[int], top: int) -> tuple[dict[int, float], ...]:
    """The `top` log-probabilities (fp32) before each answer token, given the prompt and the answer so far."""
    import torch

    ids = torch.tensor([[*prompt_ids, *answer_ids[:-1]]])
    with torch.inference_mode():
        logits = model(ids, logits_to_keep=len(answer_ids)).logits[0].float()
    values, tokens = torch.log_softmax(logits, -1).topk(top)
    return tuple(cut(dict(zip(t, v, strict=True)), top) for t, v in zip(tokens.tolist(), values.tolist(), strict=True))
