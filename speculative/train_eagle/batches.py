"""Answers as the head's entries, in batches that lay them end to end.

A row is a prompt and an answer: P prompt tokens, then the answer's. Entries at the prompt's positions 1 .. P - 1 are
*context*: they give keys, and nothing is learnt from them. An entry at position p >= P has its token, the target's
feature of p - 1, the target's feature of p, and the token the target says next. Nothing is padded: rows of a few
tokens and of a thousand share a batch.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .answers import Answer, Features

Pair = tuple[Answer, Features]

SHORTEST = 2
"""Entries that an answer must have to be learnt from."""


@dataclass(frozen=True)
class Row:
    tokens: NDArray[np.int32]  # [n]
    features: Features  # [n - 1, H]
    start: int  # P
    next_rows: NDArray[np.int32]  # [A], the draft vocabulary's row of the token after each entry, -1: not in it

    @property
    def num_contexts(self) -> int:
        return self.start - 1

    @property
    def num_entries(self) -> int:
        """A: entries at positions P .. n - 2."""
        return len(self.tokens) - 1 - self.start


@dataclass(frozen=True)
class Batch:
    """C context entries and A answer entries of all rows. Filled by `batch_of`."""

    contexts: tuple[int, ...]  # of each row
    entries: tuple[int, ...]  # of each row
    context_tokens: Tensor  # [C]
    context_features: Tensor  # [C, H]
    tokens: Tensor  # [A]
    features: Tensor  # [A, H], of the position before each entry
    goals: Tensor  # [A, H], of the entry's own position
    next_rows: Tensor  # [A]
    places: Tensor  # [A], of each entry in its row's answer

    def to(self, device: torch.device) -> Batch:
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def rows_of(pairs: Sequence[Pair], kept: Tensor) -> list[Row]:
    """`kept` [D] are the draft vocabulary's tokens."""
    most = max((max(answer.prompt_ids + answer.answer_ids) for answer, _ in pairs), default=0)
    row_of_token = np.full(max(most, int(kept.max())) + 1, -1, np.int32)
    row_of_token[kept.numpy()] = np.arange(len(kept))
    found = []
    for answer, features in pairs:
        tokens = np.array(answer.prompt_ids + answer.answer_ids, np.int32)
        start = len(answer.prompt_ids)
        if len(tokens) - 1 - start >= SHORTEST:
            found.append(Row(tokens, features, start, row_of_token[tokens[start + 1 :]]))
    return found


def dealt(rows: Sequence[Row], batch_tokens: int, seed: int, epoch: int) -> Iterator[list[Row]]:
    """All rows once, in a drawn order, in batches of at most `batch_tokens` entries; a longer row has its own."""
    order = list(rows)
    random.Random(f"{seed} {epoch}").shuffle(order)
    batch: list[Row] = []
    for row in order:
        if batch and sum(other.num_entries for other in batch) + row.num_entries > batch_tokens:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def batch_of(rows: Sequence[Row]) -> Batch:
    def joined(parts: Iterable[NDArray[Any]], dtype: torch.dtype) -> Tensor:
        """In torch's own memory: how it is aligned decides how products round."""
        return torch.cat([torch.from_numpy(np.array(part)).to(dtype) for part in parts])

    return Batch(
        contexts=tuple(row.num_contexts for row in rows),
        entries=tuple(row.num_entries for row in rows),
        context_tokens=joined((row.tokens[1 : row.start] for row in rows), torch.int64),
        context_features=joined((row.features[: row.start - 1] for row in rows), torch.float32),
        tokens=joined((row.tokens[row.start : -1] for row in rows), torch.int64),
        features=joined((row.features[row.start - 1 : -1] for row in rows), torch.float32),
        goals=joined((row.features[row.start :] for row in rows), torch.float32),
        next_rows=joined((row.next_rows for row in rows), torch.int64),
        places=joined((np.arange(row.num_entries) for row in rows), torch.int64),
    )


def noisy(batch: Batch, size: float, seed: int) -> Batch:
    """With normal noise on all features that are read; what is to be learnt stays exact."""
    draw = torch.Generator().manual_seed(seed)

    def shaken(features: Tensor) -> Tensor:
        return features + size * torch.randn(features.shape, generator=draw)

    return replace(batch, features=shaken(batch.features), context_features=shaken(batch.context_features))
