"""Muon (Jordan et al. 2024): a matrix learns in fewer steps than by AdamW, as its steps have no weak directions.

torch has it too, but multiplies in bfloat16 whatever the processor: without instructions for it that is a fifth of
float32's speed, and takes longer here than the step it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # Newton-Schulz, as published
_ROUNDS = 5
_LIKE_ADAMW = 0.2  # root mean square of a step, by which AdamW's rates suit (Liu et al. 2025)


class Muon(torch.optim.Optimizer):
    """With Nesterov momentum and decoupled weight decay. Matrices alone."""

    def __init__(self, matrices: Sequence[nn.Parameter], weight_decay: float) -> None:
        super().__init__(matrices, {"lr": 0.0, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(matrix)
                momentum: Tensor = state["momentum"].lerp_(matrix.grad, 1 - _MOMENTUM)
                made = orthogonal(matrix.grad.lerp(momentum, _MOMENTUM))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(made, alpha=-group["lr"] * _LIKE_ADAMW * max(matrix.shape) ** 0.5)


def orthogonal(matrix: Tensor) -> Tensor:
    """All its singular values near 1."""
    a, b, c = _COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_ROUNDS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x
