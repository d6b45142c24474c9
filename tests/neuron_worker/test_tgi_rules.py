"""Rows marked as TGI's: scores as transformers' own processors make them, and neighbours that notice nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from neuronserve.neuron_worker.device.base import Want
from neuronserve.neuron_worker.drawing import Draws
from neuronserve.neuron_worker.sampling import HostSampler
from neuronserve.neuron_worker.state import Ending, LiveRequest
from neuronserve.neuron_worker.tgi_rules import TgiRules, keep_typical, penalize

from .engine import Engine, expected, greedy
from .tiny_model import VOCAB_SIZE

LN2 = math.log(2)


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine()


class TestMark:
    def test_no_mark_no_rules(self) -> None:
        assert TgiRules.of(SamplingParams()) is None
        assert TgiRules.of(SamplingParams(extra_args={"other": 1})) is None

    def test_an_empty_mark_is_one(self) -> None:
        assert TgiRules.of(SamplingParams(extra_args={"tgi": {}})) == TgiRules()

    def test_its_values(self) -> None:
        rules = TgiRules.of(SamplingParams(extra_args={"tgi": {"frequency_penalty": -1, "typical_p": 0.5}}))
        assert rules == TgiRules(frequency_penalty=-1.0, typical_p=0.5)
        assert rules.asked == {"frequency_penalty": -1.0, "typical_p": 0.5}

    @pytest.mark.parametrize(
        ("mark", "message"),
        [
            ("yes", "set by the TGI routes"),
            ({"top_k": 3}, "set by the TGI routes"),
            ({"typical_p": 0}, "above 0, up to 1"),
            ({"typical_p": 1.5}, "above 0, up to 1"),
            ({"frequency_penalty": "1"}, "send a number"),
            ({"frequency_penalty": True}, "send a number"),
            ({"frequency_penalty": math.nan}, "send a number"),
        ],
        ids=str,
    )
    def test_another_s_mark_is_refused_at_the_door(self, engine: Engine, mark: object, message: str) -> None:
        with pytest.raises(VLLMValidationError, match=message):
            engine.one([3, 4], greedy(1, extra_args={"tgi": mark}))


def test_the_frequency_penalty_by_hand() -> None:
    scores = np.zeros(6, dtype=np.float32)
    penalize(scores, [5, 1, 5, 5], 2.0)
    assert scores.tolist() == [0, -0.5, 0, 0, 0, -1.5]


@pytest.mark.parametrize("typical_p", [0.01, 0.2, 0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("possible", [1, 2, 50, 1000])
def test_typical_tokens_are_those_of_transformers(typical_p: float, spread: float, possible: int) -> None:
    warper = TypicalLogitsWarper(mass=typical_p)
    for seed in range(10):
        random = np.random.default_rng(seed)
        scores = random.standard_normal(1000) * spread
        scores[random.permutation(1000)[possible:]] = -math.inf
        weights = np.exp(scores - scores.max())
        keep_typical(weights, typical_p)
        theirs = warper(None, torch.from_numpy(scores)[None])[0]
        assert np.flatnonzero(weights).tolist() == torch.isfinite(theirs).nonzero()[:, 0].tolist()


PROMPT, OUTPUT = [5, 9, 9, 30, 9, 5], [30, 41]

ASKED: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "frequency_penalty": 1.5},
    {"temperature": 0, "repetition_penalty": 0.7, "frequency_penalty": -2.0},
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.7},
    {"temperature": 1.0, "typical_p": 0.3},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.8, "top_p": 0.95, "typical_p": 0.95, "repetition_penalty": 1.2},
    {
        "temperature": 1.7,
        "top_k": 30,
        "top_p": 0.9,
        "typical_p": 0.5,
        "repetition_penalty": 1.1,
        "frequency_penalty": 2.0,
    },
]


def processed(scores: torch.Tensor, asked: dict[str, Any]) -> torch.Tensor:
    """Log-probabilities by transformers' processors in TGI's order. `scores` [vocabulary]."""
    ids, row = torch.tensor([PROMPT + OUTPUT]), scores[None]
    row = RepetitionPenaltyLogitsProcessor(asked.get("repetition_penalty", 1.0))(ids, row)
    counts = torch.nn.functional.one_hot(ids[0], VOCAB_SIZE).sum(0)
    row = row - asked.get("frequency_penalty", 0.0) * counts / ids.shape[1]
    warpers = {
        "temperature": TemperatureLogitsWarper,
        "top_k": TopKLogitsWarper,
        "top_p": TopPLogitsWarper,
        "typical_p": TypicalLogitsWarper,
    }
    for name, warper in warpers.items():
        if asked.get(name):
            row = warper(asked[name])(ids, row)
    return row[0].log_softmax(-1)


def tgi_params(asked: dict[str, Any], **more: Any) -> SamplingParams:
    rules = {name: asked[name] for name in ("frequency_penalty", "typical_p") if name in asked}
    rest = {name: value for name, value in asked.items() if name not in rules}
    return SamplingParams(**rest, **more, extra_args={"tgi": rules})


def live(name: str, params: SamplingParams) -> LiveRequest:
    ending = Ending(Want.LOGITS, seed=params.seed)
    return LiveRequest(id=name, params=params, prompt=PROMPT, ending=ending, output=list(OUTPUT))


Reported = tuple[int, dict[int, float]]


def sample(engine: Engine, asked: list[SamplingParams], logits: np.ndarray) -> list[Reported]:
    """Token and reported log-probabilities of each request; all share one batch."""
    sampler = HostSampler(engine.worker.vllm_config, VOCAB_SIZE, Draws(0))
    requests = [live(str(index), params) for index, params in enumerate(asked)]
    drawn = sampler.sample(requests, list(logits), None)  # type: ignore[arg-type]
    assert drawn.logprobs is not None
    found: dict[str, Reported] = {}
    for index, request in enumerate(drawn.requests):
        width = (request.params.logprobs or 0) + 1
        ids, values = (table[index, :width].tolist() for table in drawn.logprobs[:2])
        found[request.id] = drawn.tokens[index], dict(zip(ids, values, strict=True))
    return [found[request.id] for request in requests]


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_scores_are_those_of_transformers_processors(engine: Engine, asked: dict[str, Any]) -> None:
    for seed in range(5):
        logits = (np.random.default_rng(seed).standard_normal(VOCAB_SIZE) * 2).astype(np.float32)
        [(token, reported)] = sample(engine, [tgi_params(asked, seed=seed, logprobs=10)], logits[None])

        theirs = processed(torch.from_numpy(logits), asked)
        possible = torch.isfinite(theirs)
        if asked["temperature"] == 0:
            assert token == int(theirs.argmax())
        assert possible[token]
        top = theirs.topk(min(10, int(possible.sum()))).indices.tolist()
        assert reported.keys() == {token, *top}
        assert reported == pytest.approx({id: float(theirs[id]) for id in reported}, abs=1e-5)


def test_a_request_gives_the_same_alone_and_beside_others_of_either_kind(engine: Engine) -> None:
    openai = [
        SamplingParams(temperature=0.7, top_p=0.8, seed=1, logprobs=4),
        SamplingParams(temperature=0, frequency_penalty=1.0, repetition_penalty=1.2, logprobs=0),
    ]
    tgi = [tgi_params(asked, seed=2, logprobs=7) for asked in (ASKED[3], ASKED[11])]
    params = [openai[0], tgi[0], openai[1], tgi[1]]
    logits = np.random.default_rng(0).standard_normal((4, VOCAB_SIZE)).astype(np.float32)

    together = sample(engine, params, logits)
    assert together == [sample(engine, [own], row[None])[0] for own, row in zip(params, logits, strict=True)]


def test_through_vllm_a_tgi_row_reports_what_was_left_and_its_neighbour_the_model_s_own(engine: Engine) -> None:
    # The distribution is 1/2, 1/4, 1/8, ... from the answer on; of it top_k=2 leaves 2/3 and 1/3.
    limits = {"temperature": 1.0, "top_k": 2, "max_tokens": 4, "seed": 5, "logprobs": 3, "ignore_eos": True}
    params = [SamplingParams(**limits, extra_args={"tgi": {}}), SamplingParams(**limits), greedy(4, logprobs=1)]
    tgi, openai, other = (output.outputs[0] for output in engine.generate([[3, 4]] * 3, params))

    assert list(tgi.token_ids) == list(openai.token_ids)  # the same seed draws the same
    tokens = [3, 4]
    assert tgi.logprobs is not None
    assert openai.logprobs is not None
    for token, ours, theirs in zip(tgi.token_ids, tgi.logprobs, openai.logprobs, strict=True):
        [first] = expected(tokens, 1)
        shares = {id: round(math.exp(entry.logprob), 4) for id, entry in ours.items()}
        assert shares == {first: 0.6667, (first + 1) % VOCAB_SIZE: 0.3333}
        assert {id: round(-entry.logprob / LN2) for id, entry in theirs.items()} == {
            (first + i) % VOCAB_SIZE: i + 1 for i in range(3)
        }
        tokens.append(token)
    assert list(other.token_ids) == expected([3, 4], 4)


def test_the_frequency_penalty_through_vllm_counts_the_prompt_too(engine: Engine) -> None:
    # After [14, 40, 3] comes 45; around the vocabulary 40 is nearer than 41, by ln 2 = 0.693. But 40 is one of three.
    def answer(**more: Any) -> list[int]:
        return engine.tokens_of([14, 40, 3], greedy(1, allowed_token_ids=[40, 41], **more))

    assert answer(frequency_penalty=2.0) == [40]  # vLLM's looks at the output alone
    assert answer(extra_args={"tgi": {"frequency_penalty": 2.0}}) == [40]  # 2.0 / 3 = 0.667
    assert answer(extra_args={"tgi": {"frequency_penalty": 2.2}}) == [41]  # 2.2 / 3 = 0.733


def test_without_rules_and_log_probabilities_the_device_samples(engine: Engine) -> None:
    before = engine.worker.neuronserve_metrics()
    engine.one([3, 4, 5], greedy(4, extra_args={"tgi": {}}))
    between = engine.worker.neuronserve_metrics()
    engine.one([3, 4, 5], SamplingParams(max_tokens=4, ignore_eos=True, extra_args={"tgi": {"typical_p": 0.9}}))
    after = engine.worker.neuronserve_metrics()

    assert between["rows_sampled_on_device"] - before["rows_sampled_on_device"] == 4
    assert after["rows_sampled_on_host"] - between["rows_sampled_on_host"] == 4
