"""Answers as the head's entries, in padded batches.

A row is a prompt and an answer: P prompt tokens, then the answer's. Entries at the prompt's positions 1 .. P - 1 are
*context*: they give keys, and nothing is learnt from them. An entry at position p >= P has its token, the target's
feature of p - 1, the target's feature of p, and what the target says next: the `WANTED` likeliest draft tokens with
their probabilities. Contexts are padded on the left and answers on the right, so that the two meet.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .answers import Answer
from .features import Features

WANTED = 16

Pair = tuple[Answer, Features]

SHORTEST = 2
"""Entries that an answer must have to be learnt from."""


@dataclass(frozen=True)
class Row:
    tokens: NDArray[np.int64]  # [n]
    features: Features  # [n - 1, H]
    start: int  # P
    next_rows: NDArray[np.int64]  # [A], the draft vocabulary's row of the token after each entry, -1: not in it
    best_rows: NDArray[np.int64]  # [A, WANTED]
    best_weights: NDArray[np.float32]  # [A, WANTED], their probabilities among themselves

    @property
    def num_entries(self) -> int:
        """A: entries at positions P .. n - 2."""
        return len(self.tokens) - 1 - self.start


@dataclass(frozen=True)
class Batch:
    """B rows, C context entries, A answer entries. Filled by `batch_of`."""

    context_tokens: Tensor  # [B, C]
    context_features: Tensor  # [B, C, H]
    context_real: Tensor  # [B, C] bool
    tokens: Tensor  # [B, A]
    features: Tensor  # [B, A, H], of the position before each entry
    goals: Tensor  # [B, A, H], of the entry's own position
    real: Tensor  # [B, A] bool
    next_rows: Tensor  # [B, A]
    best_rows: Tensor  # [B, A, WANTED]
    best_weights: Tensor  # [B, A, WANTED]

    def to(self, device: torch.device) -> Batch:
        return Batch(**{name: value.to(device) for name, value in vars(self).items()})


@torch.inference_mode()
def rows_of(pairs: Sequence[Pair], kept: Tensor, lm_head: Tensor) -> list[Row]:
    """`kept` [D] are the draft vocabulary's tokens, `lm_head` [D, H] the target's rows of these."""
    narrow = torch.bfloat16
    narrow_head = lm_head.to(narrow)
    row_of_token = {token: row for row, token in enumerate(kept.tolist())}
    found = []
    for answer, values in pairs:
        tokens = np.array(answer.prompt_ids + answer.answer_ids)
        start = len(answer.prompt_ids)
        if len(tokens) - 1 - start < SHORTEST:
            continue
        goals = torch.from_numpy(values[start:].astype(np.float32)).to(lm_head.device)
        logits, best = (goals.to(narrow) @ narrow_head.T).topk(min(WANTED, len(kept)))  # of [A, D]
        weights = logits.float().softmax(-1)
        next_rows = np.array([row_of_token.get(token, -1) for token in tokens[start + 1 :].tolist()])
        found.append(Row(tokens, values, start, next_rows, best.cpu().numpy(), weights.cpu().numpy()))
    return found


def dealt(rows: Sequence[Row], batch_tokens: int, seed: int, epoch: int) -> Iterator[list[Row]]:
    """All rows once, in batches of about `batch_tokens` entries whose rows are of like length, in a drawn order."""
    draw = random.Random(f"{seed} {epoch}")
    order = sorted(rows, key=lambda row: (row.num_entries + draw.randint(0, 16), draw.random()))
    batches: list[list[Row]] = [[]]
    for row in order:
        longest = max([row.num_entries, *(other.num_entries for other in batches[-1])])
        if batches[-1] and longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
        batches[-1].append(row)
    draw.shuffle(batches)
    yield from (batch for batch in batches if batch)


def batch_of(rows: Sequence[Row]) -> Batch:
    contexts, entries = max(row.start - 1 for row in rows), max(row.num_entries for row in rows)
    hidden, best = rows[0].features.shape[1], rows[0].best_rows.shape[1]
    count = len(rows)
    batch = Batch(
        torch.zeros(count, contexts, dtype=torch.int64),
        torch.zeros(count, contexts, hidden),
        torch.zeros(count, contexts, dtype=torch.bool),
        torch.zeros(count, entries, dtype=torch.int64),
        torch.zeros(count, entries, hidden),
        torch.zeros(count, entries, hidden),
        torch.zeros(count, entries, dtype=torch.bool),
        torch.full((count, entries), -1, dtype=torch.int64),
        torch.zeros(count, entries, best, dtype=torch.int64),
        torch.zeros(count, entries, best),
    )
    for index, row in enumerate(rows):
        first, num = contexts - (row.start - 1), row.num_entries
        features = torch.from_numpy(row.features.astype(np.float32))
        batch.context_tokens[index, first:] = torch.from_numpy(row.tokens[1 : row.start])
        batch.context_features[index, first:] = features[: row.start - 1]
        batch.context_real[index, first:] = True
        batch.tokens[index, :num] = torch.from_numpy(row.tokens[row.start : -1])
        batch.features[index, :num] = features[row.start - 1 : -1]
        batch.goals[index, :num] = features[row.start :]
        batch.real[index, :num] = True
        batch.next_rows[index, :num] = torch.from_numpy(row.next_rows)
        batch.best_rows[index, :num] = torch.from_numpy(row.best_rows)
        batch.best_weights[index, :num] = torch.from_numpy(row.best_weights)
    return batch


def noisy(batch: Batch, size: float, seed: int) -> Batch:
    """With normal noise on all features that are read; what is to be learnt stays exact."""
    draw = torch.Generator().manual_seed(seed)

    def shaken(features: Tensor) -> Tensor:
        return features + size * torch.randn(features.shape, generator=draw)

    return replace(batch, features=shaken(batch.features), context_features=shaken(batch.context_features))
