"""The target's own greedy answers, kept in a file from which a broken run goes on.

    prompts ─ template ─▶ token ids ─ Writer ─▶ answers.jsonl: one line for each prompt, in their order

The writer is the engine of this package, on any machine, or transformers, where there is a GPU or the model is tiny.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from neuronserve.neuron_worker.errors import ConfigError

from .prompts import Prompt

Say = Callable[[str], None]

Features = NDArray[np.float16]

CHUNK = 768
"""Prompts that are lost at most when a run is broken off."""


@dataclass(frozen=True)
class Answer:
    kind: str
    prompt_ids: list[int]
    answer_ids: list[int]  # with the token that ended it


@dataclass(frozen=True)
class Written:
    """What followed a prompt."""

    tokens: list[int]
    features: Features | None = None  # [prompt and tokens - 1, H], from a writer that meets them on its way


class Writer(Protocol):
    def write(self, prompts: Sequence[list[int]], num_tokens: int, temperature: float) -> list[Written]:
        """Greedily at temperature 0."""


class TransformersWriter:
    def __init__(self, model: Any, pad: int, ends: frozenset[int], batch: int = 64) -> None:
        self._model, self._pad, self._ends, self._batch = model, pad, ends, batch

    @torch.inference_mode()
    def write(self, prompts: Sequence[list[int]], num_tokens: int, temperature: float) -> list[Written]:
        torch.manual_seed(0)  # what is imagined is the same every time
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        written = [Written([])] * len(prompts)
        for start in range(0, len(order), self._batch):
            chosen = order[start : start + self._batch]
            for index, tokens in zip(
                chosen, self._rows([prompts[i] for i in chosen], num_tokens, temperature), strict=True
            ):
                written[index] = Written(tokens)
        return written

    def _rows(self, prompts: Sequence[list[int]], num_tokens: int, temperature: float) -> Iterator[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[self._pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        device = self._model.device
        sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
        output = self._model.generate(
            ids.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=num_tokens,
            pad_token_id=self._pad,
            **sampling,
        )
        for row in output[:, width:].tolist():
            end = next((at + 1 for at, token in enumerate(row) if token in self._ends), len(row))
            yield row[:end]


def answered(path: Path) -> list[Answer]:
    """What a file holds; a last line that was being written when the run broke off does not count."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [Answer(**json.loads(line)) for line in lines[:-1]]


def answer_all(
    path: Path,
    prompts: Sequence[Prompt],
    ids: Sequence[list[int]],
    writer: Callable[[], Writer],
    num_tokens: int,
    say: Say,
    keep: Callable[[int, Sequence[Features]], None] = lambda first, features: None,
) -> list[Answer]:
    """Answers of all `prompts`, whose tokens are `ids`: those in the file, and the missing ones written to it. `keep`
    is given the features of answers from `first` on, where the writer has them."""
    answers = answered(path)
    if any(answer.prompt_ids != asked for answer, asked in zip(answers, ids, strict=False)):
        raise ConfigError(f"{path} answers other prompts; give the --data and --seed it was made with, or remove it")
    _rewrite(path, answers)
    started, num_written = time.monotonic(), 0
    while len(answers) < len(prompts):
        chunk = range(len(answers), min(len(answers) + CHUNK, len(prompts)))
        written = writer().write([ids[index] for index in chunk], num_tokens, 0.0)
        new = [Answer(prompts[n].kind, ids[n], its.tokens) for n, its in zip(chunk, written, strict=True)]
        keep(len(answers), [its.features for its in written if its.features is not None])
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(answer)) + "\n" for answer in new)
        answers += new
        num_written += sum(len(its.tokens) for its in written)
        rate = num_written / (time.monotonic() - started)
        say(f"answers {len(answers)}/{len(prompts)}, {num_written} tokens, {rate:.0f} tokens/s")
    return answers[: len(prompts)]


def _rewrite(path: Path, answers: Sequence[Answer]) -> None:
    """Drops a torn last line."""
    text = "".join(json.dumps(asdict(answer)) + "\n" for answer in answers)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
