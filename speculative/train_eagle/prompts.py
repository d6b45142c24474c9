"""What the target is asked, so that its own answers can be learnt from.

    data files ─ read ─▶ Row(source, conversation or text) ─ ask ─▶ Prompt(kind, messages)
    first answers ─ follow_ups ─▶ more prompts

A conversation is asked up to its first and up to its last user turn. A plain text is made into instructions: summarize,
translate, continue, explain, ask a question about it. What the target answered to some of them is asked about in turn:
its German is to be translated back, its questions are to be answered with and without the text.

Knows no model, no tokenizer and no tensor.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from neuronserve.neuron_worker.errors import ConfigError

Message = dict[str, str]

USER = "user"
GERMAN, QUESTION = "to_german", "ask"
"""Kinds whose answers are asked about again."""

_PASSAGE_WORDS = (40, 200)
_LONG_WORDS, _EVERY_LONG = (300, 750), 5  # one passage in so many is a long one
_QUESTION_WORDS = 120  # of a long passage, that a question is asked about
_SENTENCE_WORDS = (6, 32)

_OF_PASSAGES = {
    "summary": (
        "Summarize: {text}",
        "Summarize the following text in a few sentences.\n\n{text}",
        "{text}\n\nGive a short summary of the text above.",
    ),
    QUESTION: ("Write one short question that the following passage answers.\n\n{text}",),
    "explain": ("{text}\n\nWhat is this text about?", "What are the main points of this text?\n\n{text}"),
    "rewrite": ("Rewrite the following text so that a child understands it.\n\n{text}",),
    "extract": ("List the names, places and dates in this text.\n\n{text}",),
    "continue": ("Continue this text:\n\n{text}",),
}
_OF_SENTENCES = {
    GERMAN: ("Translate to German: {text}", "Translate English to German: {text}"),
    "correct": ("Correct the grammar of this sentence: {text}",),
}
_TURNS = (
    "summary",
    GERMAN,
    QUESTION,
    "explain",
    GERMAN,
    "summary",
    "rewrite",
    QUESTION,
    "extract",
    "continue",
    "correct",
)
"""How the pieces of the texts are dealt out."""

_LONG_TURNS = ("summary", QUESTION)
"""And the long ones."""

_FROM_TEXT = ("Context: {text}\n\nQuestion: {question}\nAnswer:", "{text}\n{question}", "{text}\n\n{question}")


@dataclass(frozen=True)
class Prompt:
    kind: str
    messages: tuple[Message, ...]
    about: str = ""  # the text an instruction was made from

    @classmethod
    def of(cls, kind: str, content: str, about: str = "") -> Prompt:
        return cls(kind, ({"role": USER, "content": content},), about)


@dataclass(frozen=True)
class Row:
    source: str
    content: list[Message] | str


def read(paths: Sequence[Path]) -> Iterator[Row]:
    """Conversations and plain texts of JSONL files, and plain texts of .txt files, one a line."""
    for path in paths:
        if not path.is_file():
            raise ConfigError(f"--data {path} is no file; give a JSONL file of messages or text, or a .txt file")
        found = False
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if line.strip():
                found = True
                yield Row(path.name, line) if path.suffix == ".txt" else _row(path, number, line)
        if not found:
            raise ConfigError(f"--data {path} is empty; give one JSON object a line with messages or text")


def _row(path: Path, number: int, line: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"--data {path} line {number} is not JSON ({error}); plain text goes into a .txt file"
        ) from None
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        return Row(path.name, row["text"])
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not all(isinstance(turn, dict) and "role" in turn for turn in messages):
        raise ConfigError(f"--data {path} line {number} has neither messages nor text; one of the two is needed")
    turns = [{"role": str(turn["role"]), "content": str(turn.get("content") or "")} for turn in messages]
    return Row(str(row.get("source", path.name)), turns)


def ask(rows: Sequence[Row], seed: int, cuts: int = 1) -> list[Prompt]:
    """Prompts of all rows, in an order drawn from `seed`; texts are cut into passages `cuts` times, each time
    elsewhere. The sources take turns while they last, so that the first hundred have as many of a small source as of
    a large one."""
    draw = random.Random(seed)
    by_source: dict[str, list[Prompt]] = {}
    for source in dict.fromkeys(row.source for row in rows):
        prompts = list(_of_source([row.content for row in rows if row.source == source], draw, cuts))
        draw.shuffle(prompts)
        by_source[source] = prompts
    dealt = itertools.zip_longest(*by_source.values())
    return [prompt for turn in dealt for prompt in turn if prompt is not None]


def _of_source(contents: Sequence[list[Message] | str], draw: random.Random, cuts: int) -> Iterator[Prompt]:
    texts = [text for text in contents if isinstance(text, str)] * cuts
    pieces = [piece for text in texts for piece in _passages(text, draw)]
    for turns, chosen in ((_TURNS, [p for p in pieces if not _is_long(p)]), (_LONG_TURNS, filter(_is_long, pieces))):
        for index, piece in enumerate(chosen):
            yield _instruction(turns[index % len(turns)], piece, draw)
    for messages in contents:
        if not isinstance(messages, str):
            yield from _of_conversation(messages)


def follow_ups(prompt: Prompt, answer: str) -> list[Prompt]:
    """What is asked about an answer of the target."""
    if prompt.kind == GERMAN:
        return [Prompt.of("to_english", f"Translate German to English: {answer}")]
    if prompt.kind == QUESTION:
        question = answer.strip().split("\n")[0]
        form = _FROM_TEXT[len(question) % len(_FROM_TEXT)]
        return [
            Prompt.of("answer", question),
            Prompt.of("answer_from_text", form.format(text=prompt.about, question=question)),
        ]
    return []


def _of_conversation(messages: list[Message]) -> list[Prompt]:
    if any(turn["role"] not in ("system", USER, "assistant") for turn in messages):
        return []  # tool results have no place in most chat templates
    asked = [index for index, turn in enumerate(messages) if turn["role"] == USER]
    ends = sorted({asked[0], asked[-1]}) if asked else []
    return [Prompt("chat", tuple(messages[: end + 1])) for end in ends]


def _passages(text: str, draw: random.Random) -> list[str]:
    """Pieces of some dozen to some hundred words, without a word lost between them."""
    words = text.split(" ")
    pieces, start = [], 0
    while start < len(words):
        size = _PASSAGE_WORDS if draw.randrange(_EVERY_LONG) else _LONG_WORDS
        end = start + draw.randint(*size)
        piece = " ".join(words[start:end]).strip()
        if len(words[start:end]) >= _PASSAGE_WORDS[0]:
            pieces.append(piece)
        start = end
    return pieces


def _is_long(piece: str) -> bool:
    return piece.count(" ") >= _LONG_WORDS[0] - 1


def _instruction(kind: str, piece: str, draw: random.Random) -> Prompt:
    if kind in _OF_PASSAGES:
        words = piece.split(" ")
        start = draw.randint(0, len(words) - _QUESTION_WORDS) if kind == QUESTION and _is_long(piece) else 0
        asked = " ".join(words[start : start + _QUESTION_WORDS]) if kind == QUESTION else piece
        return Prompt.of(kind, draw.choice(_OF_PASSAGES[kind]).format(text=asked), piece)
    sentence = " ".join(piece.split(" ")[: draw.randint(*_SENTENCE_WORDS)])
    return Prompt.of(kind, draw.choice(_OF_SENTENCES[kind]).format(text=sentence), sentence)
