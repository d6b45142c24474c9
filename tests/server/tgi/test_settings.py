"""The settings of the routes, and the errors that name what is wrong with one."""

from __future__ import annotations

import json

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.options import tgi_option
from neuronserve.server.tgi.settings import TgiSettings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_best": 3}, r"neuronserve.tgi.max_best: no such setting; did you mean max_best_of\? \(known: model_id,"),
        ({"max_best_of": 0}, "neuronserve.tgi.max_best_of=0: expected a whole number of at least 1"),
        ({"max_best_of": "two"}, "neuronserve.tgi.max_best_of='two': expected a whole number of at least 1"),
        ({"any_model_name": "maybe"}, "neuronserve.tgi.any_model_name='maybe': expected True or False"),
        ({"cors_allow_origin": 5}, "neuronserve.tgi.cors_allow_origin=5: expected a list"),
    ],
)
def test_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        TgiSettings.from_mapping(given)


def test_what_a_shell_leaves() -> None:
    settings = TgiSettings.from_mapping(
        {"max_best_of": "4", "cors_allow_origin": "http://a,http://b", "disable_grammar_support": "true"}
    )
    assert (settings.max_best_of, settings.disable_grammar_support) == (4, True)
    assert settings.cors_allow_origin == ("http://a", "http://b")


def test_they_travel_as_json() -> None:
    settings = TgiSettings(model_id="m", cors_allow_origin=("http://a",), max_total_tokens=9)
    assert TgiSettings.from_mapping(json.loads(json.dumps(settings.to_json()))) == settings


@pytest.mark.parametrize(
    ("given", "longest", "total"),
    [
        ({}, 99, 100),
        ({"max_total_tokens": 50}, 49, 50),
        ({"max_input_tokens": 20}, 20, 100),
        ({"max_input_tokens": 100}, 100, 100),
    ],
)
def test_deduced_from_the_engine(given: dict[str, object], longest: int, total: int) -> None:
    settings = TgiSettings.from_mapping(given).deduced(model_id="m", max_model_len=100)
    assert (settings.model_id, settings.max_input_tokens, settings.max_total_tokens) == ("m", longest, total)


def test_more_than_the_engine_has() -> None:
    with pytest.raises(ConfigError, match=r"max_total_tokens=101: the engine serves max_model_len=100"):
        TgiSettings(max_total_tokens=101).deduced(model_id="m", max_model_len=100)
    with pytest.raises(ConfigError, match=r"max_input_tokens=101 is above max_total_tokens=100"):
        TgiSettings(max_input_tokens=101).deduced(model_id="m", max_model_len=100)


@pytest.mark.parametrize(
    ("given", "environ", "option"),
    [
        ({}, {}, {}),
        ({"tgi": True}, {}, {}),
        ({"tgi": False}, {}, None),
        ({"tgi": "false"}, {}, None),
        ({}, {"NEURONSERVE_TGI": "0"}, None),
        ({}, {"NEURONSERVE_TGI": '{"max_best_of": 3}'}, {"max_best_of": 3}),
        ({"tgi": {"max_best_of": 3}}, {"NEURONSERVE_TGI": "0"}, {"max_best_of": 3}),
    ],
)
def test_the_option(given: dict[str, object], environ: dict[str, str], option: object) -> None:
    assert tgi_option(given, environ) == option


@pytest.mark.parametrize("value", ["{", {"max_bets_of": 3}])
def test_a_wrong_option_is_refused_before_anything_is_loaded(value: object) -> None:
    with pytest.raises(ConfigError, match="tgi"):
        tgi_option({"tgi": value}, {})
