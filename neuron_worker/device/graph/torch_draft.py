"""A draft on torch: its rounds after a step, each one run of its graph.

The first round is a call of prompts, one per row: the tokens that stand and the newest one. The others are decode steps
of one token. Knows no model's names and no plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..base import DeviceOptions, Int32
from ..draft_rows import DraftRow
from .draft import Draft
from .torch_ops import DecodeTensors, KvCache, PrefillTensors, TorchBatch, TorchOps, as_index, empty_cache


class TorchDraft:
    """A draft and its cache, which has the blocks of the model's."""

    def __init__(self, draft: Draft, options: DeviceOptions, num_blocks: int) -> None:
        spec = draft.spec
        self._draft = draft
        self._num_drafts = options.num_drafts
        self._longest = options.max_model_len
        self.cache: KvCache = empty_cache(
            spec.num_layers, num_blocks, options.block_size, spec.num_kv_heads, spec.head_dim
        )

    def run(self, rows: Sequence[DraftRow], context: int, features: torch.Tensor | None) -> Int32:
        """[N, k]"""
        end = min(context, self._longest)
        drafts = np.array([[row.newest] * self._num_drafts for row in rows], dtype=np.int32)
        positions = np.array([row.end for row in rows])
        alive = np.array([row.newest >= 0 and row.end < end for row in rows])
        blocks = as_index(np.stack([row.blocks for row in rows]))
        batch, carried = _reading(rows, alive, blocks), None
        for number in range(self._num_drafts):
            if number:
                positions = positions + 1
                alive = alive & (positions < end)
                drafts[:, number:] = drafts[:, number - 1 : number]  # for rows that have no place for more
                tokens = np.where(alive, drafts[:, number - 1], 0)[:, None]
                places = as_index(np.where(alive, positions, 0))
                batch = TorchBatch(DecodeTensors(as_index(tokens), places, as_index(alive), blocks), None, None)
            ops = TorchOps(batch, self.cache, features, carried)
            self._draft.guess(ops)
            carried = ops.carried
            drafts[alive, number] = ops.tokens.numpy()[alive]
        return drafts


def _reading(rows: Sequence[DraftRow], alive: np.ndarray, blocks: torch.Tensor) -> TorchBatch:
    tokens = [
        np.append(row.tokens, np.int32(row.newest)) if drafts else row.tokens
        for row, drafts in zip(rows, alive.tolist(), strict=True)
    ]
    lengths = np.array([len(own) for own in tokens])
    ids = as_index(np.concatenate(tokens))
    prompts = PrefillTensors(
        tokens=ids,
        starts=as_index(np.cumsum(lengths) - lengths),
        lengths=as_index(lengths),
        positions=as_index(np.array([row.position for row in rows])),
        blocks=blocks,
        targets=ids,  # none is scored
    )
    return TorchBatch(None, prompts, None)
