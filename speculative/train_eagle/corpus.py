"""All the target's answers for one training: user turns it makes up, answers, and answers about its answers.

    rows ─ ask ─▶ prompts ┐
    imagined user turns ──┴─ answers.jsonl ─ follow_ups ─▶ prompts ─▶ follow_ups.jsonl

A user turn is imagined by letting the target go on after the words of its chat template that open one (the method is
known as Magpie, Xu et al. 2024). Every stage is a file; what is there is not made again.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from neuronserve.neuron_worker.errors import ConfigError

from .answers import Answer, Say, Writer, answer_all
from .features import keep_features
from .prompts import USER, Prompt, Row, follow_ups

GIVEN = "given"
"""The kind of what the target did not say itself."""

_IMAGINED_TOKENS = 80
_LEAST_CONTEXT = 8
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


class Chat:
    """A tokenizer and its chat template."""

    def __init__(self, tokenizer: Any, most_prompt_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.most = most_prompt_tokens

    def ids(self, prompt: Prompt, *, is_open: bool = True) -> list[int]:
        """`is_open`: up to where the target's next answer begins."""
        messages = list(prompt.messages)
        return self.encode(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=is_open))

    def opening(self) -> list[int]:
        """The template up to where a first user turn begins."""
        turn = [{"role": USER, "content": _MARK}]
        text = self.tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        return self.encode(text.split(_MARK)[0])

    def text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True)).strip()

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


def collect(
    folder: Path,
    target: str,
    prompts: Sequence[Prompt],
    chat: Chat,
    make_writer: Callable[[], Writer],
    *,
    num_imagined: int,
    num_prompts: int | None,
    num_answers: int | None,
    num_tokens: int,
    tools: Mapping[str, str],
    say: Say,
) -> dict[str, list[Answer]]:
    """Answers to the first `num_prompts` prompts and as many imagined ones as asked for, mixed, the first `num_answers`
    of them; and answers to their follow-ups. `tools`: options that say who makes what is kept."""
    writer = cache(make_writer)  # brought up only where something is missing
    folder.mkdir(parents=True, exist_ok=True)
    numbers = {"--imagine": num_imagined, "--answer-tokens": num_tokens}
    made_with: dict[str, str | int] = {"--target": target, **numbers, **tools}
    _check_made_with(folder / "made_with.json", made_with)
    asked = _mixed(list(prompts[:num_prompts]), _imagine(folder / "imagined.jsonl", chat, writer, num_imagined, say))
    asked, ids = _fitting(asked, chat, say)
    asked, ids = asked[:num_answers], ids[:num_answers]
    if not asked:
        raise ConfigError(
            f"--data has no prompt of at most {chat.most} tokens; give shorter ones or --max-prompt-tokens"
        )

    def all_of(name: str, asked: Sequence[Prompt], ids: Sequence[list[int]]) -> list[Answer]:
        keep = partial(keep_features, folder / name)
        return answer_all(folder / f"{name}.jsonl", asked, ids, writer, num_tokens, say, keep)

    answers = all_of("answers", asked, ids)
    pairs = zip(asked, answers, strict=True)
    further = [more for prompt, answer in pairs for more in follow_ups(prompt, chat.text(answer.answer_ids))]
    further, ids = _fitting(further, chat, say)
    return {"answers": answers, "follow_ups": all_of("follow_ups", further, ids)}


def as_they_stand(rows: Sequence[Row], chat: Chat, count: int) -> list[Answer]:
    """The first `count` pieces of the data's own conversations and texts, the sources in turn. The target's features
    and distributions on them teach a head too, and cost one pass where answers cost one for each token."""
    by_source: dict[str, list[Answer]] = {}
    for row in rows:
        by_source.setdefault(row.source, []).extend(_pieces(row, chat))
    dealt = itertools.zip_longest(*by_source.values())
    return [piece for turn in dealt for piece in turn if piece is not None][:count]


def _pieces(row: Row, chat: Chat) -> Iterator[Answer]:
    if isinstance(row.content, str):
        ids, first = chat.encode(row.content), _LEAST_CONTEXT
    else:
        prompt = Prompt(GIVEN, tuple(row.content))
        ids, first = chat.ids(prompt, is_open=False), len(chat.opening())
    for start in range(0, len(ids), chat.most):
        piece = ids[start : start + chat.most]
        context = max(first if not start else 0, _LEAST_CONTEXT)
        if len(piece) > context + _LEAST_CONTEXT:
            yield Answer(GIVEN, piece[:context], piece[context:])


def _check_made_with(path: Path, asked: Mapping[str, str | int]) -> None:
    """What is in the folder is not made again, so it must be what is asked for."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else asked
    for key, value in asked.items():
        if known.get(key, value) != value:
            raise ConfigError(
                f"{key} {value}: what is in {path.parent} was made with {known[key]}; give that, or another --work"
            )
    path.write_text(json.dumps(asked), encoding="utf-8")


def _imagine(path: Path, chat: Chat, writer: Callable[[], Writer], count: int, say: Say) -> list[Prompt]:
    if count and not path.exists():
        written = writer().write([chat.opening()] * count, _IMAGINED_TOKENS, 1.0)
        unfinished = path.with_suffix(".part")
        unfinished.write_text("".join(json.dumps(chat.text(its.tokens)) + "\n" for its in written), encoding="utf-8")
        unfinished.replace(path)
        say(f"imagined {count} user turns")
    lines = path.read_text(encoding="utf-8").split("\n") if count else []
    turns = dict.fromkeys(json.loads(line) for line in lines if line)
    return [Prompt.of("imagined", turn) for turn in turns if turn]


def _mixed(first: list[Prompt], second: list[Prompt]) -> list[Prompt]:
    """Both, evenly, so that every part of the answers has some of each."""
    places = [(index / len(group), prompt) for group in (first, second) for index, prompt in enumerate(group)]
    return [prompt for _, prompt in sorted(places, key=lambda place: place[0])]


def _fitting(prompts: Sequence[Prompt], chat: Chat, say: Say) -> tuple[list[Prompt], list[list[int]]]:
    pairs = [(prompt, chat.ids(prompt)) for prompt in prompts]
    short = [(prompt, ids) for prompt, ids in pairs if len(ids) <= chat.most]
    if len(short) < len(pairs):
        say(f"{len(pairs) - len(short)} of {len(pairs)} prompts are left out: more than {chat.most} tokens")
    return [prompt for prompt, _ in short], [ids for _, ids in short]
