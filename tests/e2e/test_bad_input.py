"""What a client may get wrong: each a clear 400 or 404, and the server lives on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from ..tools.server import PATIENCE, Server
from .conftest import LENGTH, MODEL


@pytest.fixture(autouse=True)
def _the_server_lives_on(server: Server) -> Iterator[None]:
    yield
    assert server.process.poll() is None
    answer = post(server, "/v1/completions", {"prompt": "Hello", "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert "Traceback" not in server.output


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json={"model": MODEL, **body}, timeout=PATIENCE)


def refusal(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["error"]["message"])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param({"prompt": [5] * (LENGTH + 1)}, [str(LENGTH)], id="prompt_too_long"),
        pytest.param({"prompt": "word " * 3 * LENGTH}, [str(LENGTH)], id="text_too_long"),
        pytest.param({"prompt": ""}, ["prompt"], id="empty_text"),
        pytest.param({"prompt": []}, ["prompt"], id="empty_tokens"),
        pytest.param({"prompt": [5, 999_999]}, ["999999"], id="out_of_vocabulary"),
        pytest.param({"prompt": [5, -3]}, ["-3"], id="negative_token"),
        pytest.param({"prompt": "Hi", "max_tokens": -1}, ["max_tokens", "-1"], id="negative_max_tokens"),
        pytest.param({"prompt": "Hi", "temperature": -0.5}, ["temperature", "-0.5"], id="temperature"),
        pytest.param({"prompt": "Hi", "top_p": 1.5}, ["top_p", "1.5"], id="top_p"),
        pytest.param({"prompt": "Hi", "top_k": -7}, ["top_k", "-7"], id="top_k"),
        pytest.param({"prompt": "Hi", "min_p": 2}, ["min_p", "2"], id="min_p"),
        pytest.param({"prompt": "Hi", "presence_penalty": 9}, ["presence_penalty", "9"], id="presence_penalty"),
        pytest.param({"prompt": "Hi", "n": 0}, ["n", "0"], id="n"),
        pytest.param({"prompt": "Hi", "logprobs": 1000}, ["logprobs", "1000"], id="logprobs"),
        pytest.param({"prompt": "Hi", "logit_bias": {"999999": 5}}, ["logit_bias", "999999"], id="logit_bias"),
        pytest.param({"prompt": "Hi", "allowed_token_ids": [999_999]}, ["allowed_token_ids"], id="allowed_token_ids"),
        pytest.param({"prompt": "Hi", "structured_outputs": {"regex": "[a-"}}, ["regex"], id="regex"),
        pytest.param({"prompt": "Hi", "structured_outputs": {"json": {"type": "strin"}}}, ["strin"], id="schema"),
    ],
)
def test_refused_naming_what_and_how_much(body: dict[str, Any], words: list[str], server: Server) -> None:
    message = refusal(post(server, "/v1/completions", body))
    assert all(word in message for word in words), message


def test_a_body_that_is_no_json(server: Server) -> None:
    headers = {"Content-Type": "application/json"}
    answer = httpx.post(f"{server.url}/v1/completions", content=b'{"prompt": ', headers=headers, timeout=PATIENCE)
    assert answer.status_code == 400


def test_an_unknown_model(server: Server) -> None:
    assert "gpt-9" in refusal(post(server, "/v1/completions", {"model": "gpt-9", "prompt": "Hi"}), 404)


def test_embeddings_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        client.embeddings.create(model=MODEL, input="a text")
    assert caught.value.status_code == 400
    assert "/v1/embeddings needs an embedding model" in str(caught.value)


def test_a_prompt_that_just_fits(server: Server) -> None:
    answer = post(server, "/v1/completions", {"prompt": [5] * (LENGTH - 1), "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 1


def test_more_tokens_than_fit_end_at_the_model_s_length(server: Server) -> None:
    answer = post(server, "/v1/completions", {"prompt": [5] * (LENGTH - 3), "max_tokens": LENGTH, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 3
    assert answer.json()["choices"][0]["finish_reason"] == "length"
