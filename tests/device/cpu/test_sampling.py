"""Draws and scores over large vocabularies by the C kernels, and the distribution they follow."""

from __future__ import annotations

import numpy as np
import pytest

from neuronserve.neuron_worker.device.base import RowSampling

from ..test_sampling import WAYS, draw
from .harness import Bench, Sampled, every_set, sample

VOCABULARIES = [1, 3, 17, 1000, 49152, 50257]


def rows_of(vocabulary: int, count: int = 6) -> np.ndarray:
    generator = np.random.default_rng(vocabulary)
    logits = generator.standard_normal((count, vocabulary)).astype(np.float32) * 3
    return logits * np.linspace(0.2, 2, count, dtype=np.float32)[:, None]  # from flat to peaked


def sampling(count: int, **how: float) -> RowSampling:
    def row(name: str, default: float, dtype: type) -> np.ndarray:
        return np.full(count, how.get(name, default), dtype)

    return RowSampling(
        want=np.ones(count, np.int32),
        temperature=row("temperature", 0.0, np.float32),
        top_k=row("top_k", 0, np.int32),
        top_p=row("top_p", 1.0, np.float32),
        min_p=row("min_p", 0.0, np.float32),
        uniforms=np.zeros((count, 1)),
    )


@every_set
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("way", WAYS)
def test_draws_by_the_rule(isa: str, vocabulary: int, way: str, bench) -> None:
    logits, how = rows_of(vocabulary), WAYS[way]
    rows = sampling(6, temperature=how.temperature, top_k=how.top_k, top_p=how.top_p, min_p=how.min_p)
    rows.uniforms[:, 0] = [0.0, 0.1, 0.35, 0.6, 0.85, 0.999]
    drawn = sample(bench(isa, 2), logits, rows).tokens
    expected = [draw(row, how, uniform) for row, uniform in zip(logits, rows.uniforms[:, 0], strict=True)]
    # Weights are float32 here and float64 there: a number within a rounding of a token's edge may fall beside it.
    for row, uniform, got, wanted in zip(logits, rows.uniforms[:, 0], drawn[:, 0].tolist(), expected, strict=True):
        edges = [draw(row, how, min(max(uniform + d, 0), 1 - 1e-9)) for d in (-1e-5, 1e-5)]
        assert got == wanted or edges[0] <= got <= edges[1]


@every_set
def test_the_lowest_id_of_equals_wins(isa: str, bench) -> None:
    logits = np.zeros((2, 1000), np.float32)
    logits[0, [300, 301, 999]] = 5.0
    logits[1] = -7.0
    assert sample(bench(isa), logits, sampling(2)).tokens[:, 0].tolist() == [300, 0]


@every_set
@pytest.mark.parametrize(("how", "kept"), [({"top_k": 3}, 3), ({"top_p": 0.25}, 25), ({"top_k": 50, "top_p": 0.5}, 25)])
def test_of_equal_tokens_the_lower_ids_are_kept(isa: str, how: dict, kept: int, bench) -> None:
    logits = np.zeros((100, 100), np.float32)
    rows = sampling(100, temperature=1.0, **how)
    rows.uniforms[:, 0] = (np.arange(100) + 0.5) / 100
    drawn = sample(bench(isa), logits, rows).tokens[:, 0]
    assert sorted(set(drawn.tolist())) == list(range(kept))


@every_set
def test_many_draws_follow_the_distribution(isa: str, bench) -> None:
    logits = np.array([2.0, -1.0, 0.5, 0.0, 1.0, -3.0, 2.0], np.float32)
    count, made = 4000, bench(isa, 2)
    rows = sampling(count, temperature=1.3)
    rows.uniforms[:, 0] = np.random.default_rng(0).random(count)
    drawn = sample(made, np.tile(logits, (count, 1)), rows).tokens[:, 0]
    weights = np.exp(logits.astype(np.float64) / 1.3)
    expected = count * weights / weights.sum()
    squares = ((np.bincount(drawn, minlength=7) - expected) ** 2 / expected).sum()
    assert squares < 22.5  # chi-square, 6 degrees of freedom: one in a thousand is above


def scores(made: Bench, logits: np.ndarray, targets: np.ndarray, best: int) -> Sampled:
    return sample(made, logits, sampling(1), targets=targets, best=best)


@every_set
@pytest.mark.parametrize("vocabulary", [3, 1000, 50257])
@pytest.mark.parametrize("best", [0, 1, 20])
def test_scores(isa: str, vocabulary: int, best: int, bench) -> None:
    best, logits = min(best, vocabulary), rows_of(vocabulary, 40)
    logits[3] = 1.25  # all equal
    logits[4, :2] = 90.0
    targets = np.random.default_rng(1).integers(0, vocabulary, 40).astype(np.int32)
    targets[[0, 17]] = -1
    result = scores(bench(isa, 2), logits, targets, best)
    wide = logits.astype(np.float64)
    logprobs = wide - np.log(np.exp(wide - wide.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
    logprobs -= wide.max(axis=1, keepdims=True)
    for row, target in enumerate(targets):
        if target < 0:
            assert (result.target_logprobs[row], result.target_ranks[row]) == (0, 0)
            assert not result.top_ids[row].any()
            continue
        order = np.argsort(-logits[row], kind="stable")[:best]
        assert abs(result.target_logprobs[row] - logprobs[row, target]) < 1e-4
        assert result.target_ranks[row] == (logits[row] >= logits[row, target]).sum()
        assert result.top_ids[row].tolist() == order.tolist()
        np.testing.assert_allclose(result.top_logprobs[row], logprobs[row, order], atol=1e-4)
