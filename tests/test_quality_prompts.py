"""The committed prompt set, tokenised by a stand-in: categories, lengths, long prompts past 8k where there is room."""

import types

import pytest

from nvfp4lab.server import quality_prompts as prompts


class Words:
    """A tokenizer of white-space separated words, with the least of a chat template."""

    def __call__(self, text: str, add_special_tokens: bool):
        assert add_special_tokens is False  # the template has them; a second BOS would shift every context
        return types.SimpleNamespace(input_ids=[hash(word) % 50_000 for word in text.replace("\n", " \n ").split(" ") if word])

    def apply_chat_template(self, messages, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{message['role']}> {message['content']} " for message in messages) + "<assistant> "


def test_every_category_is_there_and_languages_are_not_ascii() -> None:
    loaded = prompts.load(Words(), context_tokens=100_000, answer_tokens=16)
    assert {prompt.category for prompt in loaded} == set(prompts.CATEGORIES)
    assert len({prompt.name for prompt in loaded}) == len(loaded) >= 40
    scripts = [prompt.text for prompt in loaded if prompt.category == "languages"]
    assert sum(not text.isascii() for text in scripts) >= 8
    assert all(prompt.text.count("<user>") >= 2 for prompt in loaded if prompt.category == "multi_turn")


def test_long_prompts_pass_8k_tokens_where_the_model_allows() -> None:
    def long(context: int) -> list[int]:
        loaded = prompts.load(Words(), context, 16)
        return [len(prompt.token_ids) for prompt in loaded if prompt.category == "long"]

    assert all(8192 < length <= prompts.LONG_TOKENS for length in long(32_768))
    assert all(3000 < length <= 4096 - 16 for length in long(4096))
    assert long(512) == []


def test_the_asked_line_stands_at_its_place_once() -> None:
    for prompt, share in zip([p for p in prompts.load(Words(), 32_768, 16) if p.category == "long"], (0.15, 0.5, 0.9), strict=True):
        assert prompt.text.count("Halcyon") == 1
        assert prompt.text.index("Halcyon") / len(prompt.text) == pytest.approx(share, abs=0.03)
        assert prompt.text.rstrip().endswith("arrived")


def test_fewer_per_category_are_the_first_ones() -> None:
    everything = prompts.load(Words(), 100_000, 16)
    two = prompts.load(Words(), 100_000, 16, per_category=2)
    for category in prompts.CATEGORIES:
        assert [p for p in two if p.category == category] == [p for p in everything if p.category == category][:2]
