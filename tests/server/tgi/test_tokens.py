"""The demo model's real tokenizer: texts of tokens as they come, and places in bytes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from neuronserve.server.tgi.tokens import Vocabulary

TEXT = "Hé 👩‍🚀 世界 end"


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def vocabulary(tokenizer: Any) -> Vocabulary:
    return Vocabulary(tokenizer)


def test_token_texts_make_the_text_and_half_characters_are_empty(tokenizer: Any, vocabulary: Vocabulary) -> None:
    ids = tokenizer(TEXT)["input_ids"]
    reader = vocabulary.reader(tokenizer("Say:")["input_ids"])
    pieces = [reader.read(id) for id in ids]
    assert "".join(pieces) == reader.generated_text() == TEXT
    assert "" in pieces
    assert "\ufffd" not in "".join(pieces)


def test_special_tokens_have_text_and_are_not_in_the_answer(tokenizer: Any, vocabulary: Vocabulary) -> None:
    end = tokenizer.eos_token_id
    reader = vocabulary.reader([1])
    ids = [*tokenizer("a b")["input_ids"], end]
    assert [reader.read(id) for id in ids][-1] == tokenizer.eos_token
    assert reader.generated_text() == "a b"
    assert vocabulary.is_special(end)
    assert not vocabulary.is_special(ids[0])


def test_leading_spaces_stay(tokenizer: Any, vocabulary: Vocabulary) -> None:
    reader = vocabulary.reader(tokenizer("The")["input_ids"])
    (id,) = tokenizer(" old")["input_ids"]
    assert reader.read(id) == " old"


def test_places_are_bytes(vocabulary: Vocabulary) -> None:
    tokens = asyncio.run(vocabulary.encode_with_places(TEXT, add_special_tokens=True))
    raw = TEXT.encode()
    assert all(raw[token.start : token.stop].decode() == token.text for token in tokens)
    assert tokens[-1].stop == len(raw)


def test_long_texts_are_encoded_the_same_elsewhere(tokenizer: Any, vocabulary: Vocabulary) -> None:
    text = "some words " * 1000
    encoded = asyncio.run(vocabulary.encode(text, add_special_tokens=True))
    assert encoded == tokenizer(text)["input_ids"]


def test_tokens_alone(vocabulary: Vocabulary, tokenizer: Any) -> None:
    ids = tokenizer("The old")["input_ids"]
    assert vocabulary.alone(ids) == ["The", " old"]
