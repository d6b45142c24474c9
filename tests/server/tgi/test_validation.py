"""Every refusal of a request that parsed: trigger and message, and which of two comes first."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from neuronserve.server.tgi.errors import ValidationError
from neuronserve.server.tgi.schemas import GenerateParameters
from neuronserve.server.tgi.validation import (
    Limits,
    check_compiled_sampling,
    check_grammar,
    check_length,
    check_parameters,
)

LIMITS = Limits(max_best_of=2, max_stop_sequences=4, max_top_n_tokens=5, max_input_tokens=1023, max_total_tokens=1024)
PREFIX = "Input validation error: "

STREAMED = [
    ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not supported when streaming tokens"),
    ({"best_of": 0}, "`best_of` != 1 is not supported when streaming tokens"),
    ({"decoder_input_details": True}, "`decoder_input_details` == true is not supported when streaming tokens"),
]

REFUSED = [
    ({"best_of": 3, "do_sample": True}, "`best_of` must be > 0 and <= 2. Given: 3"),
    ({"best_of": 2}, "you must use sampling when `best_of` is > 1"),
    ({"temperature": 0.0}, "`temperature` must be strictly positive"),
    ({"temperature": -1}, "`temperature` must be strictly positive"),
    ({"repetition_penalty": 0.0}, "`repetition_penalty` must be strictly positive"),
    ({"frequency_penalty": 2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"frequency_penalty": -2.1}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
    ({"top_p": 0.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"top_p": 1.0}, "`top_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 0.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"typical_p": 1.0}, "`typical_p` must be > 0.0 and < 1.0"),
    ({"top_k": 0}, "`top_k` must be strictly positive"),
    ({"top_k": -1}, "`top_k` must be strictly positive"),
    ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "`stop` supports up to 4 stop sequences. Given: 5"),
    ({"seed": 1, "best_of": 2, "do_sample": True}, "`seed` must not be set when `best_of` > 1"),
    ({"top_n_tokens": 6}, "`top_n_tokens` must be >= 0 and <= 5. Given: 6"),
    ({"temperature": 2.1}, "`temperature` must be <= 2.0: this engine does not sample any hotter"),
    ({"repetition_penalty": 1e39}, "`repetition_penalty` must be >= 1e-06 and <= 1000000.0"),
    ({"repetition_penalty": 1e-38}, "`repetition_penalty` must be >= 1e-06 and <= 1000000.0"),
    ({"watermark": True}, "`watermark` is not supported by this server: leave it out, or send false"),
    ({"adapter_id": "a"}, "`adapter_id` is not supported: this server has no adapters; leave it out"),
    ({"truncate": 0}, "`truncate` must be strictly positive and less than 1023. Given: 0"),
    ({"truncate": 1024}, "`truncate` must be strictly positive and less than 1023. Given: 1024"),
]

ACCEPTED = [
    {},
    {"best_of": 0},
    {"best_of": 1},
    {"best_of": 2, "temperature": 0.5},
    {"best_of": 2, "top_k": 5},
    {"best_of": 2, "top_p": 0.5},
    {"best_of": 2, "typical_p": 0.5},
    {"temperature": 0.01},
    {"temperature": 1.0},
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"top_p": 0.99},
    {"typical_p": 0.95},
    {"top_k": 1},
    {"max_new_tokens": 1},
    {"stop": ["a", "b", "c", "d"]},
    {"stop": [""]},
    {"seed": 2**64 - 1, "best_of": 1},
    {"top_n_tokens": 5},
    {"truncate": 1},
    {"truncate": 1023},
    {"watermark": False, "adapter_id": None},
]


def check(inputs: str = "text", *, streaming: bool = False, limits: Limits = LIMITS, **asked: object) -> str:
    """The message, without its prefix; "" for none."""
    try:
        parameters = GenerateParameters.model_validate(asked)
        check_parameters(inputs, parameters, limits, streaming=streaming)
    except ValidationError as error:
        message = str(error)
        assert message.startswith(PREFIX)
        return message.removeprefix(PREFIX)
    return ""


@pytest.mark.parametrize(("asked", "message"), REFUSED)
@pytest.mark.parametrize("streaming", [False, True])
def test_refused(asked: dict[str, object], message: str, streaming: bool) -> None:
    if streaming and asked.get("best_of"):
        pytest.skip("another message comes first")
    assert check(streaming=streaming, **asked) == message


@pytest.mark.parametrize(("asked", "message"), STREAMED)
def test_refused_in_a_stream(asked: dict[str, object], message: str) -> None:
    assert check(streaming=True, **asked) == message
    assert check(streaming=False, **asked) == ""


@pytest.mark.parametrize("asked", ACCEPTED)
def test_accepted(asked: dict[str, object]) -> None:
    assert check(**asked) == ""


def test_an_endpoint_without_best_of() -> None:
    one = Limits(1, 4, 5, 1023, 1024)
    assert check(limits=one, best_of=2, do_sample=True) == "`best_of` != 1 is not allowed for this endpoint"


def test_empty_inputs() -> None:
    assert check("") == "`inputs` cannot be empty"


@pytest.mark.parametrize(("first", "second"), list(pairwise(REFUSED[2:])))
def test_the_first_of_two_wins(first: tuple[dict[str, object], str], second: tuple[dict[str, object], str]) -> None:
    assert check(**{**second[0], **first[0]}) == first[1]


@pytest.mark.parametrize(
    ("num_input", "asked", "made"),
    [(10, 5, 5), (10, None, 1014), (1023, None, 1), (1023, 1, 1), (4, 1020, 1020)],
)
def test_length(num_input: int, asked: int | None, made: int) -> None:
    assert check_length(num_input, asked, LIMITS) == made


TOO_MUCH = (
    "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 1024. "
    "Given: {} `inputs` tokens and {} `max_new_tokens`"
)


@pytest.mark.parametrize(
    ("num_input", "asked", "limits", "message"),
    [
        (10, 1015, LIMITS, TOO_MUCH.format(10, 1015)),
        (10, 170_000, LIMITS, TOO_MUCH.format(10, 170_000)),
        (2000, 1, LIMITS, TOO_MUCH.format(2000, 1)),  # before the length of the input alone
        (2000, None, LIMITS, TOO_MUCH.format(2000, 0)),
        (
            513,
            1,
            Limits(2, 4, 5, 512, 1024),
            "Input validation error: `inputs` must have less than 512 tokens. Given: 513",
        ),
        (1024, None, Limits(2, 4, 5, 1024, 1024), TOO_MUCH.format(1024, 1)),
    ],
)
def test_too_long(num_input: int, asked: int | None, limits: Limits, message: str) -> None:
    with pytest.raises(ValidationError) as refused:
        check_length(num_input, asked, limits)
    assert str(refused.value) == message


def test_as_long_as_it_may_be() -> None:
    assert check_length(512, 512, Limits(2, 4, 5, 512, 1024)) == 512


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("grammar", "meant"),
    [
        (None, None),
        ({"type": "json", "value": SCHEMA}, SCHEMA),
        ({"type": "json_object", "value": SCHEMA}, SCHEMA),
        ({"type": "json", "value": '{"properties": {}}'}, {"properties": {}}),
        ({"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}}, SCHEMA),
        ({"type": "json_schema", "value": {"schema": SCHEMA}}, SCHEMA),
        ({"type": "regex", "value": "[0-9]+"}, "[0-9]+"),
    ],
)
def test_grammar(grammar: object, meant: object) -> None:
    assert check_grammar(GenerateParameters.model_validate({"grammar": grammar}).grammar, LIMITS) == meant


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ({"type": "json", "value": 5}, "grammar is not supported"),
        ({"type": "json", "value": None}, "grammar is not supported"),
        ({"type": "json", "value": {"type": "object"}}, "grammar is not valid: Grammar must have a 'properties' field"),
        ({"type": "json", "value": "{"}, "grammar is not valid: Expecting property name enclosed in double quotes: .*"),
        (
            {"type": "json", "value": {"properties": {"a": {"anyOf": [{"$ref": "http://a/b.json"}]}}}},
            r"grammar is not valid: `\$ref` http://a/b.json is not in the schema itself; write it into `\$defs`",
        ),
        ({"type": "json", "value": {"type": 5, "properties": {}}}, "grammar is not valid: 5 is not valid under any .*"),
    ],
)
def test_grammar_refused(grammar: object, message: str) -> None:
    parsed = GenerateParameters.model_validate({"grammar": grammar}).grammar
    with pytest.raises(ValidationError, match=f"^Input validation error: {message}$"):
        check_grammar(parsed, LIMITS)


def test_grammar_turned_off() -> None:
    off = Limits(2, 4, 5, 1023, 1024, grammar_support=False)
    parsed = GenerateParameters.model_validate({"grammar": {"type": "regex", "value": "a"}}).grammar
    with pytest.raises(ValidationError, match="grammar is not supported"):
        check_grammar(parsed, off)


def test_a_device_with_compiled_sampling_refuses_by_name() -> None:
    asked = GenerateParameters.model_validate({"top_n_tokens": 2, "seed": 1, "details": True, "do_sample": True})
    with pytest.raises(ValidationError, match=r"`seed`, `top_n_tokens` cannot be had here"):
        check_compiled_sampling(asked)


@pytest.mark.parametrize("given", [{}, {"details": True}, {"do_sample": True, "temperature": 0.7, "top_k": 5}])
def test_a_device_with_compiled_sampling_takes_what_it_can(given: dict[str, Any]) -> None:
    check_compiled_sampling(GenerateParameters.model_validate(given))
