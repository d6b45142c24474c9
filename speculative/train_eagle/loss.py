"""What a head is to learn: the target's next token, and the target's feature, in every round.

The loss of a round is the cross entropy of the head's draft distribution against the target's likeliest draft tokens,
plus smooth L1 between features, as EAGLE-1 weighs them: the tokens matter, the features keep later rounds near.
Entries where the target says a token outside the draft vocabulary teach features alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from .batches import Batch
from .head import EagleHead


@dataclass(frozen=True)
class Frozen:
    """The target's parts a head shares."""

    embeddings: Tensor  # [V, H]
    lm_head: Tensor  # [D, H], the rows of the draft vocabulary


def rounds_of(head: EagleHead, frozen: Frozen, batch: Batch, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Features [B, A, H] and logits [B, A, D] of each round. Entry i of round r stands for draft r of a chain that
    began at entry i - r + 1, so the first r - 1 entries of round r mean nothing."""
    rounds = head.read(
        functional.embedding(batch.context_tokens, frozen.embeddings), batch.context_features, batch.context_real
    )
    embeddings = functional.embedding(batch.tokens, frozen.embeddings)
    features = batch.features
    for _ in range(count):
        made = head(embeddings, features, rounds)
        yield made, functional.linear(made, frozen.lm_head)
        features = torch.cat([batch.features[:, :1], made[:, :-1].to(batch.features.dtype)], dim=1)


def loss_of(head: EagleHead, frozen: Frozen, batch: Batch, num_rounds: int, feature_weight: float) -> Tensor:
    losses = []
    for depth, (made, logits) in enumerate(rounds_of(head, frozen, batch, num_rounds)):
        real = batch.real.clone()
        real[:, :depth] = False
        taught = real & (batch.next_rows >= 0)
        wanted = (_log_probabilities(logits[taught], batch.best_rows[taught]) * batch.best_weights[taught]).sum(-1)
        distance = nn.functional.smooth_l1_loss(made[real].float(), batch.goals[real])
        losses.append(feature_weight * distance - wanted.sum() / taught.sum().clamp(min=1))
    return torch.stack(losses).mean()


def _log_probabilities(logits: Tensor, rows: Tensor) -> Tensor:
    """Of the named rows: [N, D] and [N, K] give [N, K]."""
    logits = logits.float()
    return logits.gather(-1, rows) - logits.logsumexp(-1, keepdim=True)
