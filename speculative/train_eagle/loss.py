"""What a head is to learn: the target's next token, and the target's feature, in every round.

The loss of a round is the cross entropy of the head's draft distribution against the target's, plus smooth L1 between
features, as EAGLE-1 weighs them: the tokens matter, the features keep later rounds near. Entries where the target says
a token outside the draft vocabulary teach features alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .batches import Batch
from .head import EagleHead

_ROWS = 1024  # whose logits are held at a time


@dataclass(frozen=True)
class Frozen:
    """The target's parts a head shares."""

    embeddings: Tensor  # [V, H]
    lm_head: Tensor  # [D, H], the rows of the draft vocabulary


def rounds_of(head: EagleHead, frozen: Frozen, batch: Batch, count: int) -> Iterator[Tensor]:
    """Features [A, H] of each round. Entry i of round r stands for draft r of a chain that began at entry i - r + 1 of
    its row, so the first r - 1 entries of a row mean nothing in round r."""
    rounds = head.read(
        functional.embedding(batch.context_tokens, frozen.embeddings),
        batch.context_features,
        batch.contexts,
        batch.entries,
    )
    embeddings = functional.embedding(batch.tokens, frozen.embeddings)
    features = batch.features
    for _ in range(count):
        made = head(embeddings, features, rounds)
        yield made
        before = torch.cat([batch.features[:1], made[:-1].to(batch.features.dtype)])
        features = torch.where(batch.places[:, None] == 0, batch.features, before)


def loss_of(
    head: EagleHead, frozen: Frozen, batch: Batch, num_rounds: int, feature_weight: float, temperature: float
) -> Tensor:
    """`temperature`: of the target's distribution."""
    wanted = _distribution(batch.goals, frozen.lm_head, temperature)
    losses = []
    for depth, made in enumerate(rounds_of(head, frozen, batch, num_rounds)):
        real = batch.places >= depth
        taught = real & (batch.next_rows >= 0)
        weights = taught / taught.sum().clamp(min=1)
        surprise: Tensor = SoftCrossEntropy.apply(made, frozen.lm_head, wanted, weights)  # type: ignore[no-untyped-call]
        distance = nn.functional.smooth_l1_loss(made[real].float(), batch.goals[real])
        losses.append(feature_weight * distance + surprise)
    return torch.stack(losses).mean()


@torch.no_grad()
def _distribution(goals: Tensor, lm_head: Tensor, temperature: float) -> Tensor:
    """[A, D]"""
    return torch.cat(
        [functional.linear(part, lm_head).float().div_(temperature).softmax(-1) for part in torch.split(goals, _ROWS)]
    )


class SoftCrossEntropy(torch.autograd.Function):
    """Of the distribution that `made` [A, H] has by `lm_head` [D, H], against `wanted` [A, D], by `weights` [A]. Logits
    of a few rows exist at a time: the gradient is known together with the loss."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, lm_head: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
        gradient, loss = torch.empty_like(made), torch.zeros((), device=made.device)
        parts = (torch.split(values, _ROWS) for values in (made, wanted, weights, gradient))
        for rows, theirs, weight, into in zip(*parts, strict=True):
            logits = functional.linear(rows, lm_head).float()
            surprise = logits.logsumexp(-1)
            loss += (weight * (surprise - (theirs * logits).sum(-1))).sum()
            off = logits.sub_(surprise[:, None]).exp_().sub_(theirs).mul_(weight[:, None])
            into.copy_(functional.linear(off, lm_head.T))
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), None, None, None
