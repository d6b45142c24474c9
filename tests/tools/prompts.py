"""The suite's own prompts: `tests/data/prompts.jsonl`, one {id, kind, text} a line, 5 to 900 tokens of SmolLM2."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

FILE = Path(__file__).resolve().parent.parent / "data" / "prompts.jsonl"

SUBSET = (
    "harbour",
    "ask-rivers",
    "fib",
    "ar-short",
    "json-small",
    "table",
    "py-queue",
    "ja-letter",
    "rust-parse",
    "inventory",
)
"""What a quick run takes: every kind of text and every order of length, from 5 tokens to more than 800."""


@dataclass(frozen=True)
class Prompt:
    id: str
    kind: str
    text: str
    tokens: tuple[int, ...]


def read_prompts(model_dir: Path) -> list[Prompt]:
    """All of them, in the model's tokens; markup of a chat in the text becomes the special tokens it stands for."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    lines = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
    return [Prompt(**line, tokens=tuple(tokenizer.encode(line["text"]).ids)) for line in lines]


def subset(prompts: list[Prompt]) -> list[Prompt]:
    by_id = {prompt.id: prompt for prompt in prompts}
    return [by_id[id] for id in SUBSET]
