"""The committed prompt set (server/prompts/quality.jsonl) as token ids of a given model.

Categories: english, code, arithmetic, languages (non-ASCII), multi_turn (through the chat template), long. A long prompt is a
ledger of invented shipments, as many lines as fit, that ends by asking for one of them; it is built from its recipe, so
that the same file serves a model of 8k and one of 256k.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

CATEGORIES = ("english", "code", "arithmetic", "languages", "multi_turn", "long")
LONG_TOKENS = 9000  # past 8k; a model with a smaller window gets what it has
_GOODS = ("lamps", "bolts of linen", "copper pots", "clocks", "sacks of rice", "maps", "oars", "bells", "mirrors")
_SHIPS = ("Aurora", "Beatrix", "Cormorant", "Dolphin", "Esperance", "Fulmar", "Galatea")
_PORTS = ("Aden", "Bergen", "Cadiz", "Dakar", "Esbjerg", "Fremantle", "Gdansk", "Haifa", "Izmir", "Jaffa", "Kobe")


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised. text: as the model sees it, template included."""

    name: str
    category: str
    text: str
    token_ids: tuple[int, ...]


def load(tokenizer: Any, context_tokens: int, answer_tokens: int, per_category: int | None = None) -> list[Prompt]:
    """The prompt set for `tokenizer`, the first `per_category` of each category.

    context_tokens: the model's window, or less to save time; long prompts fill min(LONG_TOKENS, window - answer_tokens)
    and are left out when that is under 512 tokens.
    """
    lines = resources.files("nvfp4lab.server").joinpath("prompts/quality.jsonl").read_text(encoding="utf-8").splitlines()
    room = min(LONG_TOKENS, context_tokens - answer_tokens)
    taken = dict.fromkeys(CATEGORIES, 0)
    prompts = []
    for row in map(json.loads, lines):
        category = row["category"]
        enough = per_category is not None and taken[category] >= per_category
        if enough or (category == "long" and room < 512):
            continue
        taken[category] += 1
        text = _text(row, tokenizer, room)
        prompts.append(Prompt(row["id"], category, text, tuple(tokenizer(text, add_special_tokens=False).input_ids)))
    return prompts


def _text(row: Mapping[str, Any], tokenizer: Any, room: int) -> str:
    if "messages" in row:
        return tokenizer.apply_chat_template(row["messages"], tokenize=False, add_generation_prompt=True)
    return _ledger(row["ledger"], tokenizer, room) if "ledger" in row else row["text"]


def _ledger(recipe: Mapping[str, Any], tokenizer: Any, room: int) -> str:
    """A ledger of about `room` tokens whose asked-for line stands at `position` of it."""
    question = f"\n\nQuestion: What arrived from {recipe['asked_entry']}?\nAnswer: From {recipe['asked_entry']} arrived"
    needle = f"Entry 0: from {recipe['asked_entry']} the Halcyon brought 77 barrels of oil."
    size = [len(tokenizer(text, add_special_tokens=False).input_ids) for text in (question, _line(1000))]
    lines = [_line(number) for number in range(1, max(2, (room - size[0]) // (size[1] + 2)))]
    lines.insert(int(recipe["position"] * len(lines)), needle)
    return "\n".join(lines) + question


def _line(number: int) -> str:
    def pick(names: Sequence[str], stride: int) -> str:
        return names[number * stride % len(names)]

    return f"Entry {number}: from {pick(_PORTS, 3)} the {pick(_SHIPS, 2)} brought {number * 37 % 89 + 10} {pick(_GOODS, 5)}."
