"""Where a token is drawn and that it is the right one: the arithmetic device's distribution is 1/2, 1/4, 1/8, ..."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from neuronserve.neuron_worker.device.arithmetic import CAPABILITIES
from neuronserve.neuron_worker.device.base import Want
from neuronserve.neuron_worker.drawing import Draws, stream_key
from neuronserve.neuron_worker.sampling import Decider
from neuronserve.neuron_worker.state import Ending

from .engine import Engine, expected, greedy
from .tiny_model import VOCAB_SIZE

LN2 = math.log(2)

ON_DEVICE: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 5, "min_p": 0.1, "seed": 7},
    {"stop": ["w9"], "ignore_eos": True, "n": 2},
    {"prompt_logprobs": 2},
]
ON_HOST: list[dict[str, Any]] = [
    {"logprobs": 0},
    {"presence_penalty": 0.1},
    {"frequency_penalty": 0.1},
    {"repetition_penalty": 1.1},
    {"min_tokens": 1},
    {"logit_bias": {5: 1.0}},
    {"allowed_token_ids": [5]},
    {"bad_words": ["w5"]},
    {"logprob_token_ids": [5]},
    {"structured_outputs": StructuredOutputsParams(regex="a")},
]


class TestDecision:
    decide = Decider(CAPABILITIES, VOCAB_SIZE)

    @pytest.mark.parametrize("params", ON_DEVICE, ids=str)
    def test_the_device_draws_what_it_can(self, params: dict[str, Any]) -> None:
        assert self.decide(SamplingParams(**params)).want == Want.TOKEN

    @pytest.mark.parametrize("params", ON_HOST, ids=lambda params: next(iter(params)))
    def test_everything_else_is_drawn_on_the_host(self, params: dict[str, Any]) -> None:
        assert self.decide(SamplingParams(**params)).want == Want.LOGITS

    def test_a_top_k_above_the_device_s_limit_goes_to_the_host(self) -> None:
        decide = Decider(replace(CAPABILITIES, max_top_k=4), VOCAB_SIZE)
        wants = [decide(SamplingParams(top_k=k)).want for k in (4, 5, -1)]
        assert wants == [Want.TOKEN, Want.LOGITS, Want.TOKEN]

    def test_a_device_without_tokens_gives_logits(self) -> None:
        decide = Decider(replace(CAPABILITIES, outputs=("logits",)), VOCAB_SIZE)
        assert decide(SamplingParams(temperature=0)).want == Want.LOGITS


class TestDraws:
    def test_a_seeded_draw_depends_on_seed_and_position_alone(self) -> None:
        seeded = Ending(Want.TOKEN, temperature=1.0, seed=5)
        one, other = Draws(0), Draws(1)
        one(Ending(Want.TOKEN, temperature=1.0), 3)  # an unseeded neighbour takes no number from a seeded row
        assert [one(seeded, i) for i in range(4)] == [other(seeded, i) for i in range(4)]

    def test_seeds_and_positions_give_different_bits(self) -> None:
        keys = {stream_key(seed, position) for seed in range(-50, 50) for position in range(50)}
        assert len(keys) == 5000

    def test_draws_are_uniform(self) -> None:
        draws = Draws(None)
        numbers = [draws(Ending(Want.TOKEN, temperature=1.0, seed=seed), 0) for seed in range(4000)]
        tenths = Counter(int(number * 10) for number in numbers)
        # Each tenth expects 400, standard deviation 19.
        assert all(300 < tenths[tenth] < 500 for tenth in range(10))


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(options={"chunk_tokens": 16})


def drawn(engine: Engine, **params: Any) -> list[int]:
    """Tokens after [3, 4], whose answer is 14."""
    return engine.tokens_of([3, 4], greedy(**params))


HOST = {"min_tokens": 1}
"""Changes nothing in these tests but where the token is drawn."""


@pytest.mark.parametrize("where", [{}, HOST], ids=["device", "host"])
def test_draws_from_the_known_distribution(engine: Engine, where: dict[str, Any]) -> None:
    prompts = [[3, 4]] * 400
    params = [SamplingParams(temperature=1.0, max_tokens=1, seed=seed, **where) for seed in range(400)]
    counts = Counter(output.outputs[0].token_ids[0] for output in engine.generate(prompts, params))
    # 200, 100 and 50 expected, standard deviations 10, 9 and 7.
    assert abs(counts[14] - 200) < 50
    assert abs(counts[15] - 100) < 45
    assert abs(counts[16] - 50) < 35


@pytest.mark.parametrize("where", [{}, HOST], ids=["device", "host"])
def test_limits_of_the_distribution(engine: Engine, where: dict[str, Any]) -> None:
    def support(**params: Any) -> set[int]:
        many = [SamplingParams(temperature=1.0, max_tokens=1, seed=seed, **where, **params) for seed in range(60)]
        return {output.outputs[0].token_ids[0] for output in engine.generate([[3, 4]] * 60, many)}

    assert support(top_k=2) == {14, 15}
    assert support(top_p=0.7) == {14, 15}
    assert support(min_p=0.2) == {14, 15, 16}


@pytest.mark.parametrize("where", [{}, HOST], ids=["device", "host"])
def test_a_seed_gives_the_same_tokens_whoever_shares_the_batch(engine: Engine, where: dict[str, Any]) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10, seed=11, ignore_eos=True, **where)
    alone = engine.tokens_of([3, 4], params)

    engine.add("other", [8, 8, 8], SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, logprobs=1))
    engine.add("third", [9], SamplingParams(temperature=1.0, max_tokens=3, ignore_eos=True))
    engine.step(2)
    engine.add("seeded", [3, 4], params)
    engine.finish()

    assert engine.tokens["seeded"] == alone


def test_a_seed_draws_the_same_tokens_on_device_and_host(engine: Engine) -> None:
    params = {"temperature": 1.0, "top_p": 0.9, "seed": 3, "max_tokens": 20, "ignore_eos": True}
    on_device = engine.tokens_of([3, 4], SamplingParams(**params))
    assert on_device != expected([3, 4], 20)
    assert engine.tokens_of([3, 4], SamplingParams(**params, logprobs=1)) == on_device


def test_n_of_one_seed_are_different(engine: Engine) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10, seed=11, n=3, ignore_eos=True)
    first, again = engine.one([3, 4], params), engine.one([3, 4], params)
    texts = [tuple(output.token_ids) for output in first.outputs]
    assert len(set(texts)) == 3
    assert texts == [tuple(output.token_ids) for output in again.outputs]


def test_log_probabilities_of_each_row_are_its_own(engine: Engine) -> None:
    prompts = [[5, 6], [3, 4], [7, 7, 7], [8]]
    params = [greedy(3), greedy(3, logprobs=2), greedy(3), greedy(3, logprobs=1)]
    outputs = [output.outputs[0] for output in engine.generate(prompts, params)]

    assert [list(output.token_ids) for output in outputs] == [expected(prompt, 3) for prompt in prompts]
    assert outputs[0].logprobs is None
    for output, kept in ((outputs[1], 2), (outputs[3], 1)):
        assert output.logprobs is not None
        for token, row in zip(output.token_ids, output.logprobs, strict=True):
            found = {id: (entry.rank, round(entry.logprob / LN2, 3)) for id, entry in row.items()}  # type: ignore[union-attr]
            assert found == {(token + i) % VOCAB_SIZE: (i + 1, -(i + 1)) for i in range(kept)}


def test_prompt_log_probabilities_over_chunks(engine: Engine) -> None:
    prompt = [(5 * i) % 60 + 3 for i in range(40)]  # three chunks of 16
    scores = engine.one(prompt, greedy(2, prompt_logprobs=2)).prompt_logprobs

    assert scores is not None
    assert scores[0] is None
    for position in range(1, 40):
        [likeliest] = expected(prompt[:position], 1)
        distance = (prompt[position] - likeliest) % VOCAB_SIZE
        row = scores[position]
        assert row is not None
        assert row[prompt[position]].rank == distance + 1
        assert row[prompt[position]].logprob == pytest.approx(-(distance + 1) * LN2, rel=1e-5)
        assert row[likeliest].logprob == pytest.approx(-LN2, rel=1e-5)


def test_prompt_log_probabilities_do_not_move_the_row_to_the_host(engine: Engine) -> None:
    before = engine.worker.neuronserve_metrics()
    engine.one([3, 4, 5], greedy(4, prompt_logprobs=1))
    after = engine.worker.neuronserve_metrics()
    assert after["rows_sampled_on_host"] == before["rows_sampled_on_host"]
    assert after["rows_sampled_on_device"] == before["rows_sampled_on_device"] + 4


def test_bias_allowed_tokens_and_minimum_length(engine: Engine) -> None:
    assert drawn(engine, num_tokens=2, logit_bias={20: 100.0}) == [20, 20]
    assert drawn(engine, num_tokens=2, allowed_token_ids=[30, 31]) == [30, 30]
    # The answers 14 and 56 would stop it; until the third token they are out of bounds.
    assert drawn(engine, num_tokens=8, min_tokens=2, stop_token_ids=[14, 57])[:2] == [15, expected([3, 4, 15], 1)[0]]


def test_penalties_see_prompt_and_output(engine: Engine) -> None:
    # Of 14, 15, 16 each is ln 2 behind the one before, so a penalty of 2 sends a token that was used to the back.
    few = {"num_tokens": 3, "allowed_token_ids": [14, 15, 16]}
    assert drawn(engine, **few) == [14, 14, 14]
    assert drawn(engine, **few, presence_penalty=2.0) == [14, 15, 16]
    assert drawn(engine, **few, frequency_penalty=2.0) == [14, 15, 16]
    # After [14, 40, 3] comes 45; around the vocabulary 40 is nearer than 41, but it is in the prompt.
    asked = {"num_tokens": 1, "allowed_token_ids": [40, 41]}
    assert engine.tokens_of([14, 40, 3], greedy(**asked)) == [40]
    assert engine.tokens_of([14, 40, 3], greedy(**asked, repetition_penalty=2.0)) == [41]


def test_bad_words(engine: Engine) -> None:
    # 14 is out, so 15 comes instead.
    assert drawn(engine, num_tokens=1, bad_words=["w14"]) == [15]


def test_a_grammar_constrains_its_row_and_no_other(engine: Engine) -> None:
    grammar = StructuredOutputsParams(regex="(w20|w21)(w30|w31)")
    params = [greedy(6, structured_outputs=grammar, ignore_eos=False), greedy(6)]
    outputs = engine.generate([[3, 4], [3, 4]], params)
    constrained = list(outputs[0].outputs[0].token_ids)
    assert constrained[0] in (20, 21)
    assert constrained[1] in (30, 31)
    assert constrained[2:] == [2]  # end of sequence
    assert list(outputs[1].outputs[0].token_ids) == expected([3, 4], 6)
