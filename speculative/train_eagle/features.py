"""The target's features of all answers, computed once and kept as float16.

One file holds the features of some answers end to end, [tokens, H], so that a broken run goes on at the next file. The
last token of an answer is left out: nothing follows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .answers import Answer, Features, Say

_ANSWERS_PER_FILE = 64
_TOKENS_PER_PASS = 2048


Compute = Callable[[Sequence[list[int]]], list[Features]]
"""[tokens, H] of each row of tokens."""


def features_of_all(folder: Path, answers: Sequence[Answer], compute: Compute, say: Say) -> list[Features]:
    """[tokens - 1, H] of each answer with its prompt."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Features] = []
    started, num_made = time.monotonic(), 0
    for start in range(0, len(answers), _ANSWERS_PER_FILE):
        rows = [(answer.prompt_ids + answer.answer_ids)[:-1] for answer in answers[start : start + _ANSWERS_PER_FILE]]
        path = folder / f"{start:06d}.npy"
        ends = np.cumsum([len(row) for row in rows])
        if not path.exists() or len(np.load(path, mmap_mode="r")) != ends[-1]:
            _write(path, np.concatenate(compute(rows)))
            num_made += int(ends[-1])
            say(f"features {start + len(rows)}/{len(answers)}, {num_made / (time.monotonic() - started):.0f} tokens/s")
        found += np.split(np.load(path, mmap_mode="r"), ends[:-1])
    return found


def keep_features(folder: Path, first: int, features: Sequence[Features]) -> None:
    """Of answers from `first` on, as a writer has them: the files that hold them."""
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, len(features), _ANSWERS_PER_FILE):
        if (first + start) % _ANSWERS_PER_FILE == 0:
            _write(folder / f"{first + start:06d}.npy", np.concatenate(features[start : start + _ANSWERS_PER_FILE]))


class TorchFeatures:
    """By transformers' model without its lm_head."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder

    @torch.inference_mode()
    def __call__(self, rows: Sequence[list[int]]) -> list[Features]:
        """Rows of like length go through the target together, padded at their ends, where nothing looks at."""
        order = sorted(range(len(rows)), key=lambda index: len(rows[index]))
        found: list[Features] = [np.empty((0, 0), np.float16)] * len(rows)
        while order:
            width = len(rows[order[-1]])
            chosen = [order.pop() for _ in range(min(len(order), max(1, _TOKENS_PER_PASS // width)))]
            ids = torch.tensor([rows[index] + [0] * (width - len(rows[index])) for index in chosen])
            made = self._decoder(ids.to(self._decoder.device), use_cache=False).last_hidden_state
            for index, values in zip(chosen, made.to(torch.float16).cpu().numpy(), strict=True):
                found[index] = values[: len(rows[index])]
        return found


def _write(path: Path, values: Features) -> None:
    unfinished = path.with_suffix(".part")
    with unfinished.open("wb") as file:
        np.save(file, values)
    unfinished.replace(path)
