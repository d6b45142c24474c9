"""Where a head's training starts: not from noise, but as the best linear guess of the next feature.

fc is solved for by ridge regression, [embedding; feature] to the feature that follows, on some answers. The layer is
the target's own last one with its two output projections at zero, so that it adds nothing at first, and what it looks
at is of use as soon as it does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from .batches import Row
from .head import EagleHead
from .loss import Frozen

_RIDGE = 1e-3
_ENOUGH = 60_000
"""Entries to solve for."""


@torch.no_grad()
def start(head: EagleHead, decoder_layer: torch.nn.Module, frozen: Frozen, rows: Sequence[Row]) -> None:
    own, theirs = head.layer.state_dict(), decoder_layer.state_dict()
    head.layer.load_state_dict({name: theirs[name].float().reshape(value.shape) for name, value in own.items()})
    norm = theirs["input_layernorm.weight"].float()
    attention = head.layer.self_attn
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):  # the norm that is not there
        projection.weight.mul_(norm / norm.square().mean().sqrt())
    attention.o_proj.weight.zero_()
    head.layer.mlp.down_proj.weight.zero_()
    head.fc.weight.copy_(_linear_guess(frozen.embeddings, rows))


def _linear_guess(embeddings: Tensor, rows: Sequence[Row]) -> Tensor:
    width = 2 * embeddings.shape[1]
    squares = torch.zeros(width, width, dtype=torch.float64)
    products = torch.zeros(width, width // 2, dtype=torch.float64)
    seen = 0
    for row in rows:
        features = torch.from_numpy(np.array(row.features[row.start - 1 :])).float()
        tokens = torch.from_numpy(row.tokens[row.start : -1])
        x = torch.cat([embeddings[tokens.to(embeddings.device)].cpu(), features[:-1]], dim=-1)
        squares += (x.T @ x).double()
        products += (x.T @ features[1:]).double()
        seen += len(x)
        if seen >= _ENOUGH:
            break
    squares += _RIDGE * squares.diagonal().mean() * torch.eye(width)
    solved: Tensor = torch.linalg.solve(squares, products)
    return solved.T.to(embeddings)
