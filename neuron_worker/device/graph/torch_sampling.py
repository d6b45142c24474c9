"""Logits to tokens, and logits to the scores of given tokens: pure functions over static shapes.

The rule of a sampled row, in float64: divide by the temperature; drop what is less than min_p times the likeliest;
keep the top_k likeliest; of these the smallest set whose share reaches top_p; then the uniform number picks from what
is left, laid end to end in the order of token ids. Equal logits rank by id, the lower first.
Knows no request and no random generator: uniform numbers come with the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SamplingTensors:
    """One entry per row of logits. [M]"""

    temperature: Tensor  # 0: greedy
    top_k: Tensor  # 0: no limit
    top_p: Tensor
    min_p: Tensor
    uniforms: Tensor  # float64 in [0, 1)


def greedy_tokens(logits: Tensor) -> Tensor:
    """The likeliest id of each row, the lowest of equals. [M]"""
    is_largest = logits == logits.amax(dim=-1, keepdim=True)
    return is_largest.to(torch.int8).argmax(dim=-1)


def sampled_tokens(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Greedy rows as `greedy_tokens`, the others by the rule above. [M]"""
    greedy = sampling.temperature <= 0
    temperature = torch.where(greedy, 1.0, sampling.temperature).double()[:, None]
    scaled = logits.double() / temperature
    weights = (scaled - scaled.amax(dim=-1, keepdim=True)).exp()  # [M, vocabulary], the likeliest is 1
    weights = torch.where(weights >= sampling.min_p.double()[:, None], weights, 0.0)
    weights = _keep_likeliest(weights, sampling)
    reached = weights.cumsum(dim=-1)
    drawn = sampling.uniforms[:, None] * reached[:, -1:]
    chosen = (reached <= drawn).sum(dim=-1)
    # The product may round up to the whole: then it is the last token kept.
    last = logits.shape[-1] - 1 - (weights > 0).flip(-1).to(torch.int8).argmax(dim=-1)
    return torch.where(greedy, greedy_tokens(logits), torch.minimum(chosen, last))


def _keep_likeliest(weights: Tensor, sampling: SamplingTensors) -> Tensor:
    """`weights` without those that top_k and top_p drop."""
    ordered, ids = weights.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weights.shape[-1], device=weights.device)
    top_k = torch.where(sampling.top_k > 0, sampling.top_k, weights.shape[-1])[:, None]
    ordered = torch.where(rank < top_k, ordered, 0.0)
    reached = ordered.cumsum(dim=-1)
    before = reached - ordered
    # 1 means no limit, whatever the rounding of the sums.
    limit = torch.where(sampling.top_p < 1, sampling.top_p.double(), 2.0)[:, None]
    within = (before < limit * reached[:, -1:]) | (rank == 0)
    return torch.zeros_like(weights).scatter(-1, ids, torch.where(within, ordered, 0.0))


def score_targets(logits: Tensor, targets: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability and rank of each target, and the `num_top` likeliest ids with theirs. Rows with a negative
    target give zeros. [M], [M], [M, K], [M, K]"""
    wanted = targets >= 0
    target = targets.clamp(min=0)[:, None].long()
    total = logits.logsumexp(dim=-1, keepdim=True)
    own = logits.gather(-1, target)
    logprobs = torch.where(wanted, (own - total)[:, 0], 0.0)
    ranks = torch.where(wanted, (logits >= own).sum(dim=-1), 0)
    top, ids = logits.topk(num_top, dim=-1)
    top_logprobs = torch.where(wanted[:, None], top - total, 0.0)
    return logprobs, ranks, torch.where(wanted[:, None], ids, 0), top_logprobs
