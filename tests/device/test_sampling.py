"""Tokens a device draws itself, against the rule written out for one row in plain numpy."""

from __future__ import annotations

import numpy as np
import pytest

from neuronserve.neuron_worker.device.base import Want

from .driver import Sampling, Stream, decode, prefill
from .models import random_tokens


def draw(logits: np.ndarray, how: Sampling, uniform: float) -> int:
    if how.temperature == 0:
        return int(logits.argmax())
    scaled = logits.astype(np.float64) / np.float32(how.temperature)
    weights = np.exp(scaled - scaled.max())
    weights[weights < np.float32(how.min_p)] = 0
    order = np.argsort(-weights, kind="stable")
    if how.top_k:
        weights[order[how.top_k :]] = 0
    if how.top_p < 1:
        reached = weights[order].cumsum()
        enough = int((reached < np.float32(how.top_p) * reached[-1]).sum()) + 1
        weights[order[enough:]] = 0
    reached = weights.cumsum()
    return int(np.flatnonzero(reached > uniform * reached[-1])[0])


WAYS = {
    "greedy": Sampling(),
    "temperature": Sampling(0.8),
    "hot": Sampling(3.0),
    "top_k": Sampling(1.0, top_k=5),
    "top_k 1": Sampling(1.0, top_k=1),
    "top_p": Sampling(1.5, top_p=0.7),
    "tiny top_p": Sampling(1.0, top_p=1e-6),
    "min_p": Sampling(1.5, min_p=0.2),
    "all": Sampling(2.0, top_k=40, top_p=0.9, min_p=0.01),
    "top_k above the vocabulary": Sampling(1.0, top_k=100_000),
}
UNIFORMS = (0.0, 0.1, 0.35, 0.6, 0.85, 0.999999)


@pytest.mark.parametrize("way", WAYS)
def test_decode_rows_draw_by_the_rule(way: str, reference, drive) -> None:
    driver, stream = drive(reference("llama")), Stream(random_tokens(20, 0))
    driver.step([prefill(stream, 7)])
    logits = driver.step([decode(stream)])[0].logits[0]
    for uniform in UNIFORMS:
        stream.computed -= 1
        how = Sampling(WAYS[way].temperature, WAYS[way].top_k, WAYS[way].top_p, WAYS[way].min_p, (uniform,))
        result = driver.step([decode(stream, want=Want.TOKEN, sampling=how)])[0]
        assert result.tokens.tolist() == [draw(logits, how, uniform)]


def test_every_token_of_a_wide_row_has_its_own_number(reference, drive) -> None:
    driver, stream = drive(reference("llama")), Stream(random_tokens(20, 1))
    how = Sampling(1.3, top_p=0.95, uniforms=(0.9, 0.2, 0.5))
    driver.step([prefill(stream, 7)])
    logits = driver.step([decode(stream, 3)])[0].logits
    stream.computed -= 3
    result = driver.step([decode(stream, 3, want=Want.TOKEN, sampling=how)])[0]
    assert result.tokens.tolist() == [draw(row, how, u) for row, u in zip(logits, how.uniforms, strict=True)]


def test_rows_of_one_step_draw_each_in_their_way(reference, drive) -> None:
    driver = drive(reference("llama"))
    ways = [Sampling(), Sampling(1.0, uniforms=(0.7,)), Sampling(0.5, top_k=3, uniforms=(0.4,))]
    streams = [Stream(random_tokens(20, seed)) for seed in range(3)]
    logits = [driver.step([prefill(stream, 6)])[0].logits[0] for stream in streams]
    streams = [Stream(random_tokens(20, seed)) for seed in range(3)]
    rows = [prefill(s, 6, want=Want.TOKEN, sampling=how) for s, how in zip(streams, ways, strict=True)]
    results = driver.step(rows)
    expected = [draw(row, how, (how.uniforms or (0.0,))[0]) for row, how in zip(logits, ways, strict=True)]
    assert [result.tokens.tolist() for result in results] == [[token] for token in expected]


def test_a_row_gets_what_it_wants_and_nothing_else(reference, drive) -> None:
    model = reference("llama")
    driver, streams = drive(model), [Stream(random_tokens(20, seed)) for seed in range(3)]
    wants = (Want.NOTHING, Want.TOKEN, Want.LOGITS)
    results = driver.step([prefill(stream, 6, want=want) for stream, want in zip(streams, wants, strict=True)])
    expected = [model.logits(stream.tokens)[5] for stream in streams]
    assert [result.tokens.tolist() for result in results] == [[-1], [int(expected[1].argmax())], [-1]]
    np.testing.assert_allclose(results[2].logits, expected[2:], atol=1e-4)
    assert results[0].logits is None


@pytest.mark.parametrize("num_top", [0, 5])
def test_prompt_log_probabilities(num_top: int, reference, drive) -> None:
    model = reference("qwen2")
    driver, plain, scored = drive(model), Stream(random_tokens(20, 0)), Stream(random_tokens(20, 1))
    rows = [prefill(plain, 5), prefill(scored, 9, scored=True)]
    result = driver.step(rows, prompt_logprobs=num_top)[1]
    logits = model.logits(scored.tokens)[:9].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    own = logprobs[np.arange(9), scored.tokens[1:10]]
    np.testing.assert_allclose(result.target_logprobs, own, atol=1e-4)
    assert result.target_ranks.tolist() == (logprobs >= own[:, None]).sum(axis=1).tolist()
    order = np.argsort(-logprobs, axis=1)[:, :num_top]
    assert result.top_ids.tolist() == order.tolist()
    np.testing.assert_allclose(result.top_logprobs, np.take_along_axis(logprobs, order, 1), atol=1e-4)


def test_scores_of_many_positions_come_in_slices(reference, drive) -> None:
    model = reference("llama")
    driver, stream = drive(model), Stream(random_tokens(96, 2))
    result = driver.step([prefill(stream, 90, scored=True)], prompt_logprobs=2)[0]
    logits = model.logits(stream.tokens)[:90].astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    np.testing.assert_allclose(result.target_logprobs, logprobs[np.arange(90), stream.tokens[1:91]], atol=1e-4)
