"""Acceptance: the rule on small examples, and on thousands of draws the target's own distribution."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from neuronserve.neuron_worker.device.arithmetic import sample
from neuronserve.neuron_worker.drawing import Draws, limited, pick
from neuronserve.neuron_worker.state import Ending, Want
from neuronserve.speculative.verify import accept, accept_in_rounds, real_drafts

from ..tools.chi_square import bound, chi_square

Float64 = NDArray[np.float64]


@pytest.mark.parametrize(
    ("drafts", "drawn", "tokens"),
    [
        ([], [7], [7]),
        ([5, 6], [5, 6, 7], [5, 6, 7]),  # all accepted, and the token behind them
        ([5, 6], [5, 9, 7], [5, 9]),  # the second is replaced; what was drawn behind it followed a wrong token
        ([5, 6], [4, 6, 7], [4]),
        ([5], [5, 5], [5, 5]),
    ],
)
def test_tokens_up_to_the_first_that_is_not_its_draft(drafts: list[int], drawn: list[int], tokens: list[int]) -> None:
    assert accept(drafts, drawn) == tokens


@pytest.mark.parametrize(
    ("drafts", "real"),
    [([], []), ([3, 4], [3, 4]), ([-1, -1], []), ([3, -1], [3]), ([3, -1, 4], [3])],
)
def test_a_placeholder_and_all_behind_it_are_no_drafts(drafts: list[int], real: list[int]) -> None:
    assert real_drafts(drafts) == real


rows_of_drafts = st.lists(st.lists(st.integers(0, 2), max_size=4), max_size=5)


@given(rows_of_drafts, st.randoms(use_true_random=False))
def test_in_rounds_each_row_is_what_it_is_at_once(drafts: list[list[int]], random: np.random.Generator) -> None:
    drawn = [[random.randint(0, 2) for _ in range(5)] for _ in drafts]  # type: ignore[attr-defined]
    rounds = accept_in_rounds(drafts, lambda position, rows: [drawn[row][position] for row in rows])
    assert rounds == [accept(own, tokens) for own, tokens in zip(drafts, drawn, strict=True)]


def test_a_row_is_not_drawn_for_again_after_a_wrong_draft() -> None:
    asked: list[list[int]] = []

    def draw(position: int, rows: list[int]) -> list[int]:
        asked.append(rows)
        return [1 for _ in rows]

    assert accept_in_rounds([[1, 1], [2, 1], []], draw) == [[1, 1, 1], [1], [1]]
    assert asked == [[0, 1, 2], [0], [0]]


# Six tokens; after each token another distribution, none of them flat.
LOGITS = np.random.default_rng(7).normal(0, 1.5, (6, 6)).astype(np.float32)
LIMITS = {
    "plain": (1.0, 0, 1.0),
    "top_k": (1.0, 3, 1.0),
    "top_p": (1.0, 0, 0.8),
    "all": (1.7, 4, 0.9),
}
NUM_DRAWS = 3_000
DRAFTS = {"likely": 0, "unlikely": 4}  # rank of each draft in its distribution


def target(token: int, temperature: float, top_k: int, top_p: float) -> Float64:
    """The distribution after `token`, written out: softmax, the k likeliest, the smallest set that reaches p."""
    shares = np.exp(LOGITS[token].astype(np.float64) / temperature)
    shares /= shares.sum()
    order = np.argsort(-shares)
    kept = order[: top_k or len(order)]
    reached = np.cumsum(shares[kept]) / shares[kept].sum()
    kept = kept[: int(np.searchsorted(reached, top_p)) + 1] if top_p < 1 else kept
    result = np.zeros_like(shares)
    result[kept] = shares[kept] / shares[kept].sum()
    return result


def draft(token: int, rank: int) -> int:
    return int(np.argsort(-LOGITS[token])[rank])


def draw_on_device(token: int, limits: tuple[float, int, float], uniform: float) -> int:
    temperature, top_k, top_p = limits
    return sample(LOGITS[token], temperature, top_k, top_p, 0.0, uniform)


def draw_on_host(token: int, limits: tuple[float, int, float], uniform: float) -> int:
    temperature, top_k, top_p = limits
    return pick(limited(LOGITS[token] / np.float32(temperature), top_k or 6, top_p), uniform)


@pytest.mark.parametrize("rank", DRAFTS.values(), ids=DRAFTS)
@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("draw", [draw_on_device, draw_on_host])
def test_tokens_have_the_targets_distribution(draw: object, limits: tuple[float, int, float], rank: int) -> None:
    """Two drafts: the first token, and the second given the first, are distributed as without drafts."""
    assert callable(draw)
    random = np.random.default_rng(20_230)
    first: Counter[int] = Counter()
    second: dict[int, Counter[int]] = {token: Counter() for token in range(6)}
    accepted = 0
    drafts = [draft(0, rank)]
    drafts.append(draft(drafts[0], rank))
    for _ in range(NUM_DRAWS):
        uniforms = random.random(3)
        contexts = [0, *drafts]
        tokens = accept(drafts, [draw(c, limits, u) for c, u in zip(contexts, uniforms, strict=True)])
        first[tokens[0]] += 1
        accepted += tokens[0] == drafts[0]
        if len(tokens) == 1:  # the next step draws it from the distribution after the replacement
            tokens.append(draw(tokens[0], limits, random.random()))
        second[tokens[0]][tokens[1]] += 1
    statistic, freedom = chi_square(first, target(0, *limits))
    assert statistic < bound(freedom)
    for token, counts in second.items():
        if counts.total() > 200:
            statistic, freedom = chi_square(counts, target(token, *limits))
            assert statistic < bound(freedom), token
    # As often as the published rule accepts: min(1, p(d) / 1).
    assert accepted / NUM_DRAWS == pytest.approx(target(0, *limits)[drafts[0]], abs=0.03)


def test_the_statistic_sees_a_wrong_rule() -> None:
    """Accepting a draft and drawing again without taking it out of the distribution, as a careless sampler would."""
    random, counts = np.random.default_rng(1), Counter[int]()
    wanted = draft(0, 1)
    shares = target(0, 1.0, 0, 1.0)
    for _ in range(NUM_DRAWS):
        if random.random() < shares[wanted]:
            counts[wanted] += 1
        else:
            counts[draw_on_device(0, (1.0, 0, 1.0), random.random())] += 1
    statistic, freedom = chi_square(counts, shares)
    assert statistic > bound(freedom)


@pytest.mark.parametrize("rank", DRAFTS.values(), ids=DRAFTS)
def test_a_seed_gives_the_same_tokens_with_drafts_and_without(rank: int) -> None:
    draws = Draws(engine_seed=0)
    ending = Ending(Want.TOKEN, temperature=1.0, seed=1234)
    limits = (1.0, 0, 1.0)
    plain = [0]
    for position in range(60):
        plain.append(draw_on_device(plain[-1], limits, draws(ending, position)))
    fast = [0]
    while len(fast) < 61:
        drafts = [draft(fast[-1], rank)]
        drafts.append(draft(drafts[0], rank))
        contexts = [fast[-1], *drafts]
        position = len(fast) - 1
        fast += accept(drafts, [draw_on_device(c, limits, draws(ending, position + i)) for i, c in enumerate(contexts)])
    assert fast[:61] == plain
