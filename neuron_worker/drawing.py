"""Random draws: the numbers themselves, and the token that a number picks from a row of logits on the host.

The rule is the device's: of what temperature and min_p leave, the top_k likeliest; of these the smallest set whose
share reaches top_p; then a number in [0, 1) picks from what is left, laid end to end in the order of token ids. Equal
logits rank by id, the lower first. So a seeded request draws the same tokens on either side, and asking for
log-probabilities, say, does not change what is sampled.

Knows no requests; vLLM's sampler calls `InverseDraw` in the place of its own last stage, which sorts every row and
draws a random number per token of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from neuronserve.neuron_worker.device.base import Float32
from neuronserve.neuron_worker.state import Ending
from neuronserve.neuron_worker.tgi_rules import keep_typical

Float64 = NDArray[np.float64]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST_LOOK = 512
"""Tokens looked at for top_p before more of them are: the likeliest few hundred nearly always hold the share."""


def _mix(x: int) -> int:
    """SplitMix64's finaliser."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def stream_key(seed: int, position: int) -> int:
    """64 well-mixed bits for one draw of a seeded request."""
    return _mix((_mix((seed + _GOLDEN) & _MASK) + (position + 1) * _GOLDEN) & _MASK)


class Draws:
    """Numbers in [0, 1): of a seeded request a function of seed and output position, else from the engine's stream."""

    def __init__(self, engine_seed: int | None) -> None:
        self._unseeded = np.random.default_rng(engine_seed)

    def __call__(self, ending: Ending, position: int) -> float:
        if ending.seed is None:
            return float(self._unseeded.random())
        return (stream_key(ending.seed, position) >> 11) * 2.0**-53


class InverseDraw(torch.nn.Module):
    """Has the form of vLLM's `TopKTopPSampler`. Set before each call: `uniforms`, one number per row, None for rows
    that are not drawn at random; and `typical_p` of the rows that it limits. After it `scores` are what was left."""

    scores: torch.Tensor

    def __init__(self, logprobs_mode: str) -> None:
        super().__init__()
        self.uniforms: Sequence[float | None] = ()
        self.typical_p: Mapping[int, float] = {}
        self._returns_logits = logprobs_mode == "processed_logits"
        self._returns_logprobs = logprobs_mode == "processed_logprobs"

    def forward(
        self,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Tokens [rows], and the limited logits where the mode asks. `logits` [rows, vocabulary] is changed."""
        rows = logits.numpy()
        drawn = np.zeros(len(rows), dtype=np.int64)
        for index, uniform in enumerate(self.uniforms):
            if uniform is not None:
                top_k = rows.shape[1] if k is None else int(k[index])
                top_p = 1.0 if p is None else float(p[index])
                weights = limited(rows[index], top_k, top_p)
                if index in self.typical_p:
                    keep_typical(weights, self.typical_p[index])
                drawn[index] = pick(weights, uniform)
                rows[index][weights == 0] = -np.inf
        self.scores = logits
        if self._returns_logits:
            return torch.from_numpy(drawn), logits
        return torch.from_numpy(drawn), logits.log_softmax(dim=-1) if self._returns_logprobs else None


def limited(logits: Float32, top_k: int, top_p: float) -> Float64:
    """Weights of the tokens, the likeliest 1, those beyond the limits 0."""
    weights: Float64 = np.exp((logits - logits.max()).astype(np.float64))
    possible = weights[weights > 0]  # a grammar leaves few, and selecting among thousands of equal zeros is slow
    kept = _num_kept(possible, min(top_k, len(possible)), top_p)
    if kept < len(possible):
        last = np.partition(possible, len(possible) - kept)[len(possible) - kept]
        equals = np.flatnonzero(weights == last)
        surplus = int((possible >= last).sum()) - kept
        weights[weights < last] = 0
        weights[equals[len(equals) - surplus :]] = 0
    return weights


def _num_kept(weights: Float64, top_k: int, top_p: float) -> int:
    if top_p >= 1:
        return top_k
    wanted = top_p * (weights.sum() if top_k == len(weights) else _likeliest(weights, top_k).sum())
    look = min(_FIRST_LOOK, top_k)
    while True:
        reached = np.cumsum(_likeliest(weights, look))
        if look == top_k or reached[-1] >= wanted:
            return min(int(np.searchsorted(reached, wanted)) + 1, look)
        look = min(8 * look, top_k)


def _likeliest(weights: Float64, count: int) -> Float64:
    """The `count` largest weights, in falling order."""
    first = len(weights) - count
    return np.sort(np.partition(weights, first)[first:])[::-1]


def pick(weights: Float64, uniform: float) -> int:
    reached = np.cumsum(weights)
    token = int(np.searchsorted(reached, uniform * reached[-1], side="right"))
    # The product may round up to the whole: then it is the last token kept.
    return min(token, int(np.flatnonzero(weights)[-1]))
