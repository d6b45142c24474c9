"""The distribution of sampled answers through real vLLM, whoever drafts: it is the target's, worked out on paper.

On the arithmetic device each token lies so many places above its context's most likely one, around the vocabulary, and
that number is distributed alike after every context: 1/2, 1/4, 1/8 and so on, before temperature and limits. So all
tokens of all answers can be counted together, and two in a row must be independent of each other.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from neuronserve.neuron_worker.device.arithmetic import answer

from ..tools.chi_square import Float64, bound, chi_square
from .engine import Engine
from .test_speculation import drafting, engine, fast  # noqa: F401  (its engines, one for each proposer)
from .tiny_model import VOCAB_SIZE

NUM_TOKENS = 8
TAIL = 5  # places from here on are counted as one

HOW: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.5, "top_k": 3},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "all_on_the_host": {"temperature": 0.9, "top_k": 6, "top_p": 0.95, "logprobs": 1},
}


def shares(temperature: float, top_k: int = VOCAB_SIZE, top_p: float = 1.0, **rest: Any) -> Float64:
    """[TAIL + 1]: how often a token lies so many places above the likeliest."""
    weights = 0.5 ** (np.arange(VOCAB_SIZE) / temperature)
    weights[top_k:] = 0
    before = np.cumsum(weights) - weights
    weights[before >= top_p * weights.sum()] = 0
    return np.append(weights[:TAIL], weights[TAIL:].sum()) / weights.sum()


def places(prompt: list[int], tokens: list[int]) -> list[int]:
    found, known = [], list(prompt)
    for token in tokens:
        found.append(min(TAIL, (token - answer(known, VOCAB_SIZE)) % VOCAB_SIZE))
        known.append(token)
    return found


@pytest.mark.parametrize("how", HOW)
def test_the_distribution_is_the_targets(fast: Engine, how: str, full: bool) -> None:  # noqa: F811
    count = 2000 if full else 125
    fast.worker.runner.host_sampler._draws._unseeded = np.random.default_rng(20_230)
    prompts = [[3 + index % 61, 3 + index % 7, 5] for index in range(count)]
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **HOW[how])
    pairs: Counter[int] = Counter()
    for prompt, output in zip(prompts, fast.generate(prompts, params), strict=True):
        found = places(prompt, list(output.outputs[0].token_ids))
        pairs.update(first * (TAIL + 1) + second for first, second in zip(found[::2], found[1::2], strict=True))
    expected = shares(**HOW[how])
    joint = np.outer(expected, expected).ravel()
    statistic, freedom = chi_square(pairs, joint)
    assert statistic < bound(freedom)
    total_variation = sum(abs(pairs[pair] / pairs.total() - share) for pair, share in enumerate(joint)) / 2
    assert total_variation < (0.03 if full else 0.12)
