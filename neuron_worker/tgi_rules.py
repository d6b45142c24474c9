"""What TGI's sampling does differently from vLLM's, for the rows that come from TGI's routes.

A request is marked by `SamplingParams.extra_args = {"tgi": {...}}`; the keys that may be in it are the fields of
`TgiRules`, and an empty dictionary is a mark too. Of a marked row:

- log-probabilities are those of the *processed* scores: after penalties, temperature and limits. A token that was
  limited away has none, so it is never among the reported ones, and there may be fewer than were asked for;
- `frequency_penalty` takes from each score penalty * count / length, over the prompt and the output;
- `typical_p` keeps the tokens whose information is nearest to what the distribution gives on average. It comes last,
  after top_k and top_p.

Everything else (temperature, top_k, top_p, repetition_penalty, seed, grammar) is vLLM's, whose rules are the same.

Knows single rows of scores. Knows no batch, no sampler, no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from .device.base import Float32

if TYPE_CHECKING:
    from .drawing import Float64

MARK = "tgi"
DRAWN_SEED = "tgi_drawn_seed"
"""Beside the mark: the seed was drawn by the route and not asked for."""

_FIRST_LOOK = 512
"""Tokens sorted at first; seldom are more needed, and sorting a whole vocabulary is slow."""


@dataclass(frozen=True, slots=True)
class TgiRules:
    frequency_penalty: float = 0.0
    typical_p: float = 1.0

    @classmethod
    def of(cls, params: Any) -> TgiRules | None:
        """Of a request's sampling parameters; None where it is not marked. ValueError where the mark makes no sense."""
        marks = getattr(params, "extra_args", None) or {}
        if MARK not in marks:
            return None
        given = marks[MARK]
        known = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or not given.keys() <= set(known):
            raise ValueError(f"{MARK}={given!r}: this mark is set by the TGI routes and holds {known}; leave it out")
        rules = cls(**{name: _number(name, value) for name, value in given.items()})
        if not 0 < rules.typical_p <= 1:
            raise ValueError(f"{MARK}.typical_p={rules.typical_p}: send a number above 0, up to 1")
        return rules

    @property
    def asked(self) -> dict[str, float]:
        """What differs from asking for nothing; any of it needs the row's logits on the host."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not np.isfinite(value):
        raise ValueError(f"{MARK}.{name}={value!r}: send a number")
    return float(value)


def penalize(scores: Float32, tokens: Sequence[int], frequency_penalty: float) -> None:
    """Change `scores`, [vocabulary], in place. `tokens`: prompt and output so far."""
    ids, counts = np.unique(np.asarray(tokens, dtype=np.int64), return_counts=True)
    scores[ids] -= (counts / len(tokens) * frequency_penalty).astype(np.float32)


def keep_typical(weights: Float64, typical_p: float) -> None:
    """Set the weights of untypical tokens to 0, in place. Those that are 0 already are no part of the distribution."""
    kept = np.flatnonzero(weights)
    shares = weights[kept] / weights[kept].sum()
    information = -np.log(shares)
    oddity = np.abs(information - (shares * information).sum())
    weights[kept[oddity > _last_oddity(oddity, shares, typical_p)]] = 0


def _last_oddity(oddity: Float64, shares: Float64, typical_p: float) -> float:
    """Of the token with which the share reaches `typical_p`."""
    look = min(_FIRST_LOOK, len(oddity))
    while True:
        order = np.argpartition(oddity, look - 1)[:look]
        order = order[np.argsort(oddity[order])]
        reached = np.cumsum(shares[order])
        if look == len(oddity) or reached[-1] >= typical_p:
            return float(oddity[order[min(int((reached < typical_p).sum()), look - 1)]])
        look = min(8 * look, len(oddity))
