"""One row of a step, before packing: what the runner knows of a request that the device needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from neuronserve.neuron_worker.device.base import Int32, Want

from .shape import StepDemand

_NO_UNIFORMS: tuple[float, ...] = ()


class Row(NamedTuple):
    """Filled by the runner's state. Arrays are views, read during packing only. A tuple, because every step makes one
    for each of its rows, which a frozen dataclass takes three times as long for."""

    tokens: Int32  # [n], this step's tokens; more than one in a decode row: the last token and its drafts
    position: int  # of the first of them
    blocks: Int32  # cache blocks in order; the same array object has the same values for as long as it is given
    is_decode: bool
    want: Want
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniforms: tuple[float, ...] = _NO_UNIFORMS  # one per token, where the device samples at random
    targets: Int32 | None = None  # [n], for prompt log-probabilities; None: not wanted
    prompt_logprobs: int = 0
    lookahead: int = 0  # positions after its tokens that a draft may fill
    fused_drafts: int = 0  # after its tokens, that the device makes and verifies in this very call

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def context(self) -> int:
        """Positions the row reaches, its own tokens and those of a draft included."""
        return self.position + len(self.tokens) + self.fused_drafts + self.lookahead


def int32(values: list[int]) -> Int32:
    return np.asarray(values, dtype=np.int32)


def demand_of(rows: Sequence[Row]) -> StepDemand:
    """What a call must hold to compute these rows."""
    num_decode = width = prefill = context = 0
    for row in rows:
        length = len(row.tokens) + row.fused_drafts
        if row.is_decode:
            num_decode += 1
            width = max(width, length)
        else:
            prefill += length
        context = max(context, row.position + length + row.lookahead)
    return StepDemand(num_decode, max(width, 1), prefill, context)
