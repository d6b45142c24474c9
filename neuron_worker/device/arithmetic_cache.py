"""The `arithmetic` device's cache, which holds token ids, and the draft that looks ahead from a cache of its own.

A draft answers as the device does, from what it reads back of its own cache, and is one too high where that answer is
a multiple of 4: so three drafts of four are right, and a context that the draft did not read, or read at another place,
shows as another draft. numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from .base import SCRATCH_BLOCK, Int32
from .draft_rows import DraftRow
from .errors import DeviceError

POISON = 1_000_003  # what a cache position holds before it is written

Int64 = NDArray[np.int64]


class TokenCache:
    """[blocks, block size]"""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._cells: Int64 = np.full((num_blocks, block_size), POISON, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._cells)

    def store(self, blocks: Int32, start: int, tokens: Int32) -> None:
        """Tokens of a request, which own their blocks."""
        where, offsets = self._places(blocks, start, len(tokens))
        if (where == SCRATCH_BLOCK).any():
            raise DeviceError(f"a real token at position {start} would be written to the scratch block")
        self._cells[where, offsets] = tokens

    def store_ahead(self, blocks: Int32, position: int, token: int) -> None:
        """A token that nobody has accepted yet. The scratch block takes what lies beyond the row's own."""
        index, offset = divmod(position, self._cells.shape[1])
        block = int(blocks[index]) if index < len(blocks) else SCRATCH_BLOCK
        self._cells[block, offset] = token

    def context(self, blocks: Int32, length: int) -> Int64:
        """The first `length` tokens, as far as the row has a table for them."""
        where, offsets = self._places(blocks, 0, min(length, len(blocks) * self._cells.shape[1]))
        context: Int64 = self._cells[where, offsets]
        return context

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self._cells[target] = self._cells[source]

    def spoil(self, block: int) -> None:
        self._cells[block] = POISON

    def _places(self, blocks: Int32, start: int, count: int) -> tuple[Int32, Int64]:
        positions = np.arange(start, start + count)
        size = self._cells.shape[1]
        return blocks[positions // size], positions % size


class ArithmeticDraft:
    """`answer` is the device's own rule, from a context to the next token."""

    def __init__(self, answer: Callable[[Int64], int], vocab_size: int, num_drafts: int) -> None:
        self._answer = answer
        self._vocab_size = vocab_size
        self._num_drafts = num_drafts

    def guess(self, context: Int64) -> int:
        right = self._answer(context)
        return right if right % 4 else (right + 1) % self._vocab_size

    def run(self, cache: TokenCache, rows: Sequence[DraftRow]) -> Int32:
        """[N, k]"""
        drafts = np.full((len(rows), self._num_drafts), -1, dtype=np.int32)
        for row in rows:
            cache.store(row.blocks, row.position, row.tokens)
        for place, row in enumerate(rows):
            if row.newest >= 0:
                drafts[place] = self._look_ahead(cache, row)
                cache.spoil(SCRATCH_BLOCK)
        return drafts

    def _look_ahead(self, cache: TokenCache, row: DraftRow) -> list[int]:
        tokens = [row.newest]
        for position in range(row.end, row.end + self._num_drafts):
            cache.store_ahead(row.blocks, position, tokens[-1])
            tokens.append(self.guess(cache.context(row.blocks, position + 1)))
        return tokens[1:]
