"""The prompts are what the proofs say they are."""

from __future__ import annotations

from pathlib import Path

from ..tools.prompts import read_prompts, subset


def test_forty_of_many_kinds(smollm2: Path) -> None:
    prompts = read_prompts(smollm2)
    assert len({prompt.id for prompt in prompts}) == len(prompts) == 40
    kinds = {prompt.kind for prompt in prompts}
    assert {"chat", "code", "list", "table", "json", "prose", "japanese", "arabic", "hindi", "russian"} <= kinds


def test_five_to_nine_hundred_tokens(smollm2: Path) -> None:
    lengths = sorted(len(prompt.tokens) for prompt in read_prompts(smollm2))
    assert lengths[0] == 5
    assert 800 <= lengths[-1] <= 900
    assert sum(length > 512 for length in lengths) >= 4
    assert all(sum(low <= length < 2 * low for length in lengths) >= 4 for low in (16, 32, 64, 128, 256, 512))


def test_markup_of_a_chat_is_special_tokens(smollm2: Path) -> None:
    chats = [prompt for prompt in read_prompts(smollm2) if prompt.kind == "chat"]
    assert all(prompt.tokens[0] == 1 for prompt in chats)  # <|im_start|>


def test_the_subset_has_each_order_of_length(smollm2: Path) -> None:
    lengths = [len(prompt.tokens) for prompt in subset(read_prompts(smollm2))]
    assert min(lengths) == 5
    assert max(lengths) > 800
