"""How many drafts of a head would stand, on answers it was not trained on.

A draft counts only where all drafts before it stood, and then the tokens it follows are the answer's own: so drafting
is replayed exactly by rounds over whole answers, without a draft being fed back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from .batches import Row, batch_of
from .head import EagleHead
from .loss import Frozen, rounds_of


@dataclass(frozen=True)
class Acceptance:
    """`by_position`: the share of steps in which draft d and all before it stood."""

    by_position: tuple[float, ...]
    tokens_per_step: float

    def __str__(self) -> str:
        shares = " ".join(f"{share:.3f}" for share in self.by_position)
        return f"{self.tokens_per_step:.3f} tokens per target step, acceptance by position {shares}"


@torch.inference_mode()
def acceptance(
    head: EagleHead,
    frozen: Frozen,
    rows: Sequence[Row],
    num_drafts: int,
    device: torch.device,
    *,
    in_bfloat16: bool = False,
) -> Acceptance:
    """Of greedy decoding, `num_drafts` drafts a step."""
    accepted: list[int] = []
    for start in range(0, len(rows), 8):
        batch = batch_of(rows[start : start + 8]).to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=in_bfloat16):
            made = rounds_of(head, frozen, batch, num_drafts)
            guesses = [functional.linear(features, frozen.lm_head).argmax(-1) for features in made]
        right = torch.stack([guess == batch.next_rows for guess in guesses]).cpu()  # [drafts, A]
        for of_row in torch.split(right, list(batch.entries), dim=1):
            accepted += walk(of_row.numpy())
    counts = np.array(accepted)
    by_position = tuple(float((counts >= depth).mean()) for depth in range(1, num_drafts + 1))
    return Acceptance(by_position, float(1 + counts.mean()))


def walk(right: NDArray[np.bool_]) -> list[int]:
    """Accepted drafts of each step. `right` [drafts, A]: whether draft d at entry i, which ends a chain, is right."""
    num_drafts, length = right.shape
    steps, at = [], 0
    while at + num_drafts <= length:
        stood = 0
        while stood < num_drafts and right[stood, at + stood]:
            stood += 1
        steps.append(stood)
        at += stood + 1
    return steps
