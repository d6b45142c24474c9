"""Hugging Face transformers in float32 as the judge of greedy tokens, teacher-forced.

One forward pass over prompt + our tokens gives transformers' choice at every position. Where ours is another one, its
logit must be within 1e-4 of the best (two rounding orders may each be right there), and what follows it is dropped, for
from there on the two texts differ. At most 1 % of the sequences of a check may end so.

A pass is made once per distinct sequence: all ways of scheduling should give the same tokens, so most checks are a look
into a dictionary. Knows nothing of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

NEAR = 1e-4
SHARE = 0.01

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Mismatch:
    """The first position where our token is not transformers'. Filled by `judge`."""

    position: int  # in the generated tokens
    ours: int
    theirs: int
    gap: float  # of their logits

    def __str__(self) -> str:
        return f"token {self.position}: {self.ours}, transformers has {self.theirs}, {self.gap:.2e} above it"


def judge(logits: torch.Tensor, tokens: Sequence[int]) -> Mismatch | None:
    """`logits[i]` are what the model thinks of the place of `tokens[i]`."""
    best = logits.max(dim=-1)
    wrong = (best.indices != torch.tensor(tokens)).nonzero()
    if not len(wrong):
        return None
    at = int(wrong[0])
    gap = float(best.values[at] - logits[at, tokens[at]])
    return Mismatch(at, tokens[at], int(best.indices[at]), gap)


class Reference:
    def __init__(self, model_dir: Path | str) -> None:
        self._model_dir = model_dir
        self._longest: dict[Tokens, Tokens] = {}
        """Prompt -> the longest continuation that was judged and found equal."""

    @cached_property
    def _model(self) -> PreTrainedModel:
        return AutoModelForCausalLM.from_pretrained(self._model_dir, dtype=torch.float32).eval()

    def logits(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """[len(tokens), vocabulary]: row i is what follows the prompt and `tokens[:i]`."""
        ids = torch.tensor([[*prompt, *tokens[:-1]]])
        with torch.inference_mode():
            return self._model(ids, logits_to_keep=len(tokens)).logits[0]

    def first_token(self, prompt: Sequence[int]) -> int:
        """The greedy choice behind the prompt."""
        known = self._longest.get(tuple(prompt))
        return known[0] if known else int(self.logits(prompt, [0])[0].argmax())

    def mismatch(self, prompt: Sequence[int], tokens: Sequence[int]) -> Mismatch | None:
        key, ours = tuple(prompt), tuple(tokens)
        known = self._longest.get(key, ())
        if ours == known[: len(ours)]:
            return None
        found = judge(self.logits(prompt, ours), ours)
        if found is None and len(ours) > len(known):
            self._longest[key] = ours
        return found

    def check(self, sequences: Iterable[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Assert that these (prompt, greedy tokens) are transformers'."""
        pairs = list(sequences)
        assert pairs
        assert all(tokens for _, tokens in pairs), "a sequence without tokens"
        ended = []
        for prompt, tokens in pairs:
            found = self.mismatch(prompt, tokens)
            if found is None:
                continue
            print(f"prompt of {len(prompt)} tokens, {found}")
            assert found.gap < NEAR, f"prompt of {len(prompt)} tokens ({list(prompt[:8])} ...), {found}"
            ended.append(found)
        assert len(ended) <= SHARE * len(pairs), f"{len(ended)} of {len(pairs)} sequences leave transformers' path"
