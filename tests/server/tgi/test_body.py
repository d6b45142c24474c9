"""Bodies that are no JSON, and bodies of another shape: status and plain text of TGI's router."""

from __future__ import annotations

import pytest

from neuronserve.server.tgi import body
from neuronserve.server.tgi.errors import TransportError
from neuronserve.server.tgi.parsing import locate, to_request
from neuronserve.server.tgi.schemas import CompatGenerateRequest, GenerateRequest, VertexRequest

NOT_JSON = "Failed to parse the request body as JSON: "
WRONG = "Failed to deserialize the JSON body into the target type: "


def refusal(raw: str | bytes, model: type = GenerateRequest) -> tuple[int, str]:
    with pytest.raises(TransportError) as refused:
        to_request(body.parse(raw if isinstance(raw, bytes) else raw.encode()), model)
    return refused.value.status, str(refused.value)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("", "EOF while parsing a value at line 1 column 0"),
        ("{", "EOF while parsing an object at line 1 column 1"),
        ('{"inputs"', "EOF while parsing an object at line 1 column 9"),
        ('{"inputs":', "EOF while parsing a value at line 1 column 10"),
        ('{"inputs": "a"', "EOF while parsing an object at line 1 column 14"),
        ('{"inputs": ["a"', "EOF while parsing a list at line 1 column 15"),
        ('{"inputs": "a', "EOF while parsing a string at line 1 column 13"),
        ('{"inputs": "a",}', "trailing comma at line 1 column 16"),
        ('{"inputs": "a"} x', "trailing characters at line 1 column 17"),
        ('{"inputs": a}', "expected value at line 1 column 12"),
        ('{"inputs": NaN}', "expected value at line 1 column 14"),
        ('{"inputs": "a", "parameters": {"top_p": 1e999}}', "number out of range at line 1 column 45"),
        ("{'inputs': 1}", "key must be a string at line 1 column 2"),
        ('{"inputs" 1}', "expected `:` at line 1 column 11"),
        ('{"inputs": "a" 1}', "expected `,` or `}` at line 1 column 16"),
        ('{\n "inputs": a}', "expected value at line 2 column 12"),
        ('{"inputs": "\\ud800"}', "lone leading surrogate in hex escape"),
        (b'{"inputs": "\xff"}', "invalid unicode code point at line 1 column 12"),
        ("[" * 100_000, "recursion limit exceeded"),
        ('{"inputs": ' + "9" * 10_000 + "}", "number out of range"),
        ('{"inputs": ' + "9" * 310 + "}", "number out of range"),
    ],
)
def test_not_json(raw: str | bytes, message: str) -> None:
    status, text = refusal(raw)
    assert status == 400
    assert text.startswith(NOT_JSON + message)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ("{}", "missing field `inputs` at line 1 column 2"),
        ('{"inputs": []}', "inputs: invalid type: sequence, expected a string at line 1 column 11"),
        ('{"inputs": {}}', "inputs: invalid type: map, expected a string at line 1 column 11"),
        ('{"inputs":5}', "inputs: invalid type: integer `5`, expected a string at line 1 column 11"),
        ('{"inputs":1.5}', "inputs: invalid type: floating point `1.5`, expected a string at line 1 column 13"),
        ('{"inputs":1e-7}', "inputs: invalid type: floating point `0.0000001`, expected a string at line 1 column 14"),
        ('{"inputs":true}', "inputs: invalid type: boolean `true`, expected a string at line 1 column 14"),
        ('{"inputs":null}', "inputs: invalid type: null, expected a string at line 1 column 14"),
        ("[]", "invalid type: sequence, expected struct GenerateRequest at line 1 column 0"),
        ('"a"', 'invalid type: string "a", expected struct GenerateRequest at line 1 column 3'),
        (
            '{"inputs":"a","parameters":null}',
            "parameters: invalid type: null, expected struct GenerateParameters at line 1 column 31",
        ),
        (
            '{"inputs":"a","parameters":{"do_sample":null}}',
            "parameters.do_sample: invalid type: null, expected a boolean at line 1 column 44",
        ),
        (
            '{"inputs":"a","parameters":{"stop":null}}',
            "parameters.stop: invalid type: null, expected a sequence at line 1 column 39",
        ),
        (
            '{"inputs":"a","parameters":{"stop":["a",5]}}',
            "parameters.stop[1]: invalid type: integer `5`, expected a string at line 1 column 41",
        ),
        (
            '{"inputs":"a","parameters":{"temperature":"hot"}}',
            'parameters.temperature: invalid type: string "hot", expected f32 at line 1 column 47',
        ),
        (
            '{"inputs":"a","parameters":{"best_of":-1}}',
            "parameters.best_of: invalid value: integer `-1`, expected usize at line 1 column 40",
        ),
        (
            '{"inputs":"a","parameters":{"max_new_tokens":-1}}',
            "parameters.max_new_tokens: invalid value: integer `-1`, expected u32 at line 1 column 47",
        ),
        (
            '{"inputs":"a","parameters":{"max_new_tokens":4294967296}}',
            "parameters.max_new_tokens: invalid value: integer `4294967296`, expected u32 at line 1 column 55",
        ),
        (
            '{"inputs":"a","parameters":{"max_new_tokens":1.0}}',
            "parameters.max_new_tokens: invalid type: floating point `1.0`, expected u32 at line 1 column 48",
        ),
        (
            '{"inputs":"a","parameters":{"seed":18446744073709551616}}',
            "parameters.seed: invalid type: floating point `18446744073709552000.0`, expected u64 at line 1 column 55",
        ),
        (
            '{"inputs":"a","parameters":{"top_k":2147483648}}',
            "parameters.top_k: invalid value: integer `2147483648`, expected i32 at line 1 column 46",
        ),
        (
            '{"inputs":"a","parameters":{"truncate":-5,"top_k":"x"}}',
            "parameters.truncate: invalid value: integer `-5`, expected usize at line 1 column 41",
        ),
        (
            '{"inputs":"a","parameters":{"grammar":{"type":"xml","value":""}}}',
            "parameters.grammar: unknown variant `xml`, expected one of `json`, `json_object`, `json_schema`, `regex`",
        ),
        ('{"inputs":"a","parameters":{"grammar":{}}}', "parameters.grammar: missing field `type`"),
        ('{"inputs":"a","parameters":{"grammar":{"type":"json"}}}', "parameters.grammar: missing field `value`"),
        (
            '{"inputs":"a","parameters":{"grammar":{"type":"regex","value":5}}}',
            "parameters.grammar.value: invalid type: integer `5`, expected a string at line 1 column 63",
        ),
        ('{\n  "inputs": 5}', "inputs: invalid type: integer `5`, expected a string at line 2 column 13"),
        ('{"é": 1, "inputs": 5}', "inputs: invalid type: integer `5`, expected a string at line 1 column 21"),
    ],
)
def test_another_shape(raw: str, message: str) -> None:
    status, text = refusal(raw)
    assert status == 422
    assert text.startswith(WRONG + message)


def test_what_stands_first_in_the_document_is_refused_first() -> None:
    """What is missing comes out at its end."""
    assert "top_k" in refusal('{"parameters":{"top_k":"x"},"inputs":5}')[1]
    assert "inputs: invalid" in refusal('{"inputs":5,"parameters":{"top_k":"x"}}')[1]
    assert "top_k" in refusal('{"parameters":{"top_k":"x"}}')[1]


def test_the_name_of_the_type_is_the_route_s() -> None:
    assert refusal("[]", CompatGenerateRequest)[1].endswith("expected struct CompatGenerateRequest at line 1 column 0")


def test_an_envelope_s_member_of_no_shape() -> None:
    assert refusal('{"instances": [{"inputs": "a"}, {"text": "b"}]}', VertexRequest) == (
        422,
        f"{WRONG}data did not match any variant of untagged enum VertexInstance",
    )


@pytest.mark.parametrize(
    ("raw", "parameters"),
    [
        ('{"inputs":"a"}', {"do_sample": True}),
        ('{"inputs":"a","parameters":{}}', {"do_sample": False}),
        ('{"inputs":"a","unknown":1,"parameters":{"unknown":2}}', {"do_sample": False}),
        ('{"inputs":"a","parameters":{"temperature":2}}', {"temperature": 2.0}),
        ('{"inputs":"a","parameters":{"best_of":null,"seed":null,"grammar":null,"adapter_id":null}}', {"seed": None}),
        ('{"inputs":"a","parameters":{"seed":18446744073709551615}}', {"seed": 2**64 - 1}),
    ],
)
def test_accepted(raw: str, parameters: dict[str, object]) -> None:
    parsed = to_request(body.parse(raw.encode()), GenerateRequest)
    assert parsed.inputs == "a"
    assert {name: getattr(parsed.parameters, name) for name in parameters} == parameters


@pytest.mark.parametrize(
    "header", ["application/json", "application/json; charset=utf-8", "Application/JSON", "application/problem+json"]
)
def test_content_type(header: str) -> None:
    body.check_content_type(header)


@pytest.mark.parametrize("header", ["", "text/plain", "application/x-www-form-urlencoded", "text/json", "json"])
def test_another_content_type(header: str) -> None:
    with pytest.raises(TransportError, match=r"^Expected request with `Content-Type: application/json`$") as refused:
        body.check_content_type(header)
    assert refused.value.status == 415


def test_locate() -> None:
    text = '{"a": [1, {"b": "x,]"}, "c"], "d": {}}'
    start, end = locate(text, ("a", 1, "b"))
    assert text[start:end] == '"x,]"'
    start, end = locate(text, ("a", 2))
    assert text[start:end] == '"c"'
    start, end = locate(text, ("d",))
    assert text[start:end] == "{}"
