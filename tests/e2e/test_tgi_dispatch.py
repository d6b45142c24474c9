"""Paths that both APIs have: each client gets the answer it was written for."""

from __future__ import annotations

from typing import Any

import pytest

from ..tools.server import Server
from .conftest import MODEL
from .tgi_client import PROMPT, post

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
COMPLETION = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0}
GENERATE = {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}}


@pytest.mark.parametrize(
    ("path", "body", "kind", "keys"),
    [
        ("/tokenize", {"inputs": "Hi"}, list, {"id", "text", "start", "stop"}),
        ("/tokenize", {"prompt": "Hi"}, dict, {"count", "max_model_len", "tokens", "token_strs"}),
        ("/tokenize", CHAT, dict, {"count", "max_model_len", "tokens", "token_strs"}),
        ("/tokenize", {"inputs": "Hi", "prompt": "Ho"}, list, {"id", "text", "start", "stop"}),
        ("/invocations", GENERATE, list, {"generated_text"}),
        ("/invocations", COMPLETION, dict, {"object": "text_completion"}),
        ("/invocations", CHAT, dict, {"object": "chat.completion"}),
    ],
)
def test_by_the_body(server: Server, path: str, body: dict[str, Any], kind: type, keys: Any) -> None:
    response = post(server, path, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert type(answer) is kind
    shown = answer[0] if kind is list else answer
    if isinstance(keys, dict):
        assert {key: shown[key] for key in keys} == keys
    else:
        assert set(shown) == keys


def test_the_answer_is_the_one_of_the_route_itself(server: Server) -> None:
    handed = post(server, "/invocations", {**COMPLETION, "model": MODEL}).json()
    direct = post(server, "/v1/completions", {**COMPLETION, "model": MODEL}).json()
    assert handed["choices"] == direct["choices"]


def test_a_stream_through_sagemaker_s_path(server: Server) -> None:
    response = post(server, "/invocations", {**COMPLETION, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        ("/tokenize", {"prompt": 5}, 400, "object"),
        ("/invocations", {"prompt": PROMPT, "max_tokens": -1}, 400, "object"),
        ("/v1/completions", {"prompt": PROMPT, "model": "tgi"}, 404, "object"),
    ],
)
def test_vllm_s_errors_are_vllm_s(server: Server, path: str, body: Any, status: int, error: str) -> None:
    response = post(server, path, body)
    assert response.status_code == status, response.text
    assert response.json()["error"]["code"] == status


@pytest.mark.parametrize("body", [{}, {"x": 1}, [], 5, {"inputs": 5}])
def test_nobody_s_body(server: Server, body: Any) -> None:
    response = post(server, "/invocations", body)
    assert (response.status_code, response.text) == (
        422,
        "Failed to deserialize the JSON body into the target type: "
        "data did not match any variant of untagged enum SagemakerRequest",
    )


SCHEMA = {"type": "object", "properties": {"a": {"enum": [7]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/invocations"])
def test_both_forms_of_response_format(server: Server, path: str, form: dict[str, Any]) -> None:
    response = post(server, path, {**CHAT, "model": MODEL, "max_tokens": 40, "response_format": form})
    assert response.status_code == 200, response.text
    content = response.json()["choices"][0]["message"]["content"]
    assert "".join(content.split()) == '{"a":7}'


def test_a_regular_expression_as_response_format(server: Server) -> None:
    form = {"type": "regex", "value": "[0-9]{4}"}
    body = {**CHAT, "model": MODEL, "max_tokens": 9, "response_format": form}
    content = post(server, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert len(content) == 4
    assert content.isdigit()


def test_grammar_and_tools(server: Server) -> None:
    form = {"type": "json", "value": SCHEMA}
    response = post(server, "/v1/chat/completions", {**CHAT, "tools": [], "response_format": form})
    assert response.status_code == 422
    assert response.json() == {
        "error": "Tool error: Grammar and tools are mutually exclusive",
        "error_type": "tool_error",
    }
