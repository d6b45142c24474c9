"""Requests into what vLLM is asked, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from neuronserve.server.tgi.schemas import DEFAULT_PARAMETERS, GenerateParameters
from neuronserve.server.tgi.translate import Job, Offers, sampling_is_on, sampling_params, seed_of, truncated


def asked(**given: Any) -> GenerateParameters:
    return GenerateParameters.model_validate(given)


def job(streaming: bool = False, grammar: Any = None, **given: Any) -> Job:
    return Job("text", (1, 2, 3), asked(**given), max_new_tokens=7, grammar=grammar, streaming=streaming)


@pytest.mark.parametrize(
    ("given", "samples"),
    [
        ({}, False),
        ({"do_sample": True}, True),
        ({"temperature": 0.7}, True),
        ({"temperature": 1.0}, False),
        ({"temperature": 1.0, "do_sample": True}, True),
        ({"top_k": 1}, True),
        ({"top_p": 0.9}, True),
        ({"typical_p": 0.95}, True),
        ({"seed": 1}, False),
        ({"repetition_penalty": 1.2}, False),
        ({"frequency_penalty": 1.0}, False),
    ],
)
def test_what_turns_sampling_on(given: dict[str, Any], samples: bool) -> None:
    assert sampling_is_on(asked(**given)) is samples
    params = sampling_params(job(**given), seed=None, offers=Offers())
    assert (params.temperature > 0) is samples


def test_without_parameters_it_samples() -> None:
    assert sampling_is_on(DEFAULT_PARAMETERS)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 7}),
        ({"do_sample": True}, {"temperature": 1.0, "top_k": 0, "top_p": 1.0}),
        (
            {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2},
            {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.2},
        ),
        ({"stop": ["a"]}, {"stop": [], "detokenize": False}),
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.0, "presence_penalty": 0.0}),
        ({}, {"ignore_eos": False, "min_p": 0.0, "n": 1}),
    ],
)
def test_ordinary_fields(given: dict[str, Any], expected: dict[str, Any]) -> None:
    params = sampling_params(job(**given), seed=None, offers=Offers())
    assert {name: getattr(params, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("given", "extra"),
    [
        ({}, {}),
        ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
        ({"frequency_penalty": 0.0}, {}),
        ({"typical_p": 0.95}, {"typical_p": 0.95}),
        ({"typical_p": 0.9, "frequency_penalty": -1}, {"typical_p": 0.9, "frequency_penalty": -1.0}),
    ],
)
def test_what_only_tgi_has_travels_in_the_mark(given: dict[str, Any], extra: dict[str, float]) -> None:
    """The mark itself is always there."""
    assert sampling_params(job(**given), seed=None, offers=Offers()).extra_args == {"tgi": extra}


@pytest.mark.parametrize(("given", "is_drawn"), [({"do_sample": True}, True), ({"do_sample": True, "seed": 3}, False)])
def test_a_seed_that_nobody_asked_for_is_marked(given: dict[str, Any], is_drawn: bool) -> None:
    """Its request is drafted for where that pays, as one without a seed."""
    asked = job(**given)
    params = sampling_params(asked, seed=seed_of(asked, Offers()), offers=Offers())
    assert params.extra_args is not None
    assert params.extra_args.get("tgi_drawn_seed", False) == is_drawn


NONE = Offers(logprobs=False, seeds=False, prefill_logprobs=False)


@pytest.mark.parametrize(
    ("given", "with_scores", "without"),
    [
        ({}, None, None),
        ({"details": True}, 0, None),
        ({"decoder_input_details": True}, 0, None),
        ({"streaming": True}, 0, None),
        ({"top_n_tokens": 3}, 20, 20),
        ({"details": True, "top_n_tokens": 5}, 20, 20),
        ({"best_of": 2, "do_sample": True}, 0, 0),
        ({"best_of": 1, "do_sample": True}, None, None),
    ],
)
def test_scores_are_asked_for_where_they_show(given: dict[str, Any], with_scores: Any, without: Any) -> None:
    """An engine without any is asked only where a client asked by name, and refuses then."""
    assert sampling_params(job(**given), seed=None, offers=Offers()).logprobs == with_scores
    assert sampling_params(job(**given), seed=None, offers=NONE).logprobs == without


def test_scores_of_the_prompt() -> None:
    assert sampling_params(job(decoder_input_details=True), seed=None, offers=Offers()).prompt_logprobs == 0
    assert sampling_params(job(decoder_input_details=True), seed=None, offers=NONE).prompt_logprobs is None
    assert sampling_params(job(details=True), seed=None, offers=Offers()).prompt_logprobs is None


def test_seeds() -> None:
    assert seed_of(job(), Offers()) is None
    assert seed_of(job(seed=3), Offers()) is None  # greedy
    assert seed_of(job(do_sample=True, seed=2**64 - 1), Offers()) == 2**64 - 1
    drawn = {seed_of(job(do_sample=True), Offers()) for _ in range(20)}
    assert len(drawn) == 20
    assert all(seed is not None and 0 <= seed < 2**53 for seed in drawn)
    assert seed_of(job(do_sample=True), NONE) is None
    assert seed_of(job(do_sample=True, seed=3), NONE) == 3


@pytest.mark.parametrize("temperature", [1e-30, 1e-6, 0.009])
def test_the_coldest_that_the_engine_samples_at(temperature: float) -> None:
    """It samples, so there is a seed."""
    cold = job(temperature=temperature, seed=3)
    assert seed_of(cold, Offers()) == 3
    assert sampling_params(cold, seed=3, offers=Offers()).temperature == 0.01


def test_grammars() -> None:
    regex = sampling_params(job(grammar="[0-9]"), seed=None, offers=Offers()).structured_outputs
    schema = sampling_params(job(grammar={"properties": {}}), seed=None, offers=Offers()).structured_outputs
    assert regex is not None
    assert schema is not None
    assert (regex.regex, schema.json) == ("[0-9]", {"properties": {}})


@pytest.mark.parametrize(
    ("truncate", "kept"), [(None, (1, 2, 3, 4)), (1, (4,)), (2, (3, 4)), (4, (1, 2, 3, 4)), (9, (1, 2, 3, 4))]
)
def test_truncate_keeps_the_end(truncate: int | None, kept: tuple[int, ...]) -> None:
    assert truncated([1, 2, 3, 4], truncate) == kept
