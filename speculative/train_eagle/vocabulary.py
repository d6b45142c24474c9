"""Which tokens a head may draft."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from .answers import Answer


def frequent(answers: Sequence[Answer], count: int, vocab: int) -> Tensor:
    """The `count` most frequent tokens of the answers, ascending. Where the answers have fewer, those of the prompts
    and then the smallest ids follow, which tokenizers give to the commonest pieces."""
    said = Counter(token for answer in answers for token in answer.answer_ids)
    asked = Counter(token for answer in answers for token in answer.prompt_ids)
    order = sorted(range(vocab), key=lambda token: (-said[token], -asked[token], token))
    return torch.tensor(sorted(order[:count]))


def coverage(answers: Sequence[Answer], kept: Tensor) -> float:
    """The share of answer tokens that may be drafted."""
    tokens = torch.tensor([token for answer in answers for token in answer.answer_ids])
    return float(torch.isin(tokens, kept).float().mean())
