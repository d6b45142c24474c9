"""Programs written for TGI, unchanged: their clients against the real server."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import openai
import pytest
import requests
from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError

from ..tools import clients
from ..tools.server import PATIENCE, Server

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def older(tgi_server: Server) -> Any:
    """What the clients in an environment of their own got."""
    return clients.run(Path(__file__).with_name("older_clients.py"), tgi_server.url)


@pytest.fixture(scope="module")
def expected(tgi_server: Server) -> str:
    """Eight greedy tokens by the completion route, for a client that does not know the model's name."""
    client = openai.OpenAI(base_url=f"{tgi_server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
    return client.completions.create(model="tgi", prompt=PROMPT, max_tokens=8, temperature=0).choices[0].text


def test_text_generation(older: Any, expected: str) -> None:
    answers = older["text_generation"]

    one = answers["one"]
    assert (one["generated_tokens"], one["finish_reason"], one["seed"]) == (1, "length", None)
    assert len(one["tokens"]) == 1
    assert "".join(text for _, text, _ in one["prefill"]) == PROMPT
    assert [logprob is None for _, _, logprob in one["prefill"]] == [True] + [False] * (len(one["prefill"]) - 1)
    assert answers["greedy"]["text"] == expected
    assert "".join(text for _, text, _, _ in answers["greedy"]["tokens"]) == expected
    assert all(logprob <= 0 for _, _, logprob, _ in answers["greedy"]["tokens"])
    assert answers["chat"]


def test_text_generation_samples_with_the_seed_it_reports(older: Any) -> None:
    best, sampled = older["text_generation"]["best_of"], older["text_generation"]["sampled"]

    assert best["seed"] is not None
    assert [(seed is not None, tokens) for _, seed, tokens in best["best_of"]] == [(True, 4)]
    assert sampled["seed"] == 7


@pytest.mark.parametrize("client", ["text_generation", "text_generation_async"])
def test_text_generation_streams(older: Any, expected: str, client: str) -> None:
    stream = older[client]["stream"]

    assert len(stream["texts"]) == 8
    assert "".join(stream["texts"]) == stream["text"] == expected
    assert stream["middle"] == [None] * 7
    assert (stream["finish_reason"], stream["seed"]) == ("length", None)


def test_text_generation_from_four_places_at_once(older: Any, expected: str) -> None:
    assert older["text_generation_async"]["equal"]
    assert older["text_generation_async"]["greedy"]["text"] == expected


@pytest.mark.parametrize("call", ["too_long", "too_long_stream"])
def test_text_generation_gets_a_typed_error(older: Any, call: str) -> None:
    kind, message = older["text_generation"][call]

    assert kind == "ValidationError"
    assert message.startswith("Input validation error: `inputs` tokens + `max_new_tokens` must be <=")


def test_langchain(older: Any) -> None:
    answers = older["langchain"]

    assert answers["invoke"] == answers["again"] == "".join(answers["stream"])
    assert "Paris" in answers["stop"]
    assert "." not in answers["stop"], "it strips the stop string that the server leaves in"


@pytest.fixture(scope="module")
def hub(tgi_server: Server) -> InferenceClient:
    return InferenceClient(tgi_server.url, timeout=PATIENCE)


def test_inference_client_plain(hub: InferenceClient, expected: str) -> None:
    # A causal model's root route returns the prompt too unless told not to.
    assert hub.text_generation(PROMPT, max_new_tokens=8) == PROMPT + expected
    assert hub.text_generation(PROMPT, max_new_tokens=8, return_full_text=False) == expected


def test_inference_client_details(hub: InferenceClient, expected: str) -> None:
    answer = hub.text_generation(
        PROMPT, max_new_tokens=8, details=True, decoder_input_details=True, return_full_text=False, top_n_tokens=2
    )

    assert answer.generated_text == expected
    assert answer.details is not None
    assert (answer.details.generated_tokens, answer.details.finish_reason) == (8, "length")
    assert answer.details.prefill[0].logprob is None
    # It leaves the lists of lists as they came.
    tops: list[Any] = list(answer.details.top_tokens or [])
    assert [top[0]["id"] for top in tops] == [token.id for token in answer.details.tokens]
    assert all(len(top) >= 2 for top in tops)


def test_inference_client_stream(hub: InferenceClient, expected: str) -> None:
    assert "".join(hub.text_generation(PROMPT, max_new_tokens=8, stream=True)) == expected


def test_inference_client_stream_with_details(hub: InferenceClient, expected: str) -> None:
    events = list(hub.text_generation(PROMPT, max_new_tokens=8, stream=True, details=True))

    assert [event.index for event in events] == list(range(1, 9))
    assert events[-1].details is not None
    assert (events[-1].details.finish_reason, events[-1].details.generated_tokens) == ("length", 8)
    assert events[-1].details.input_length == 5


def test_inference_client_gets_a_typed_error(hub: InferenceClient) -> None:
    with pytest.raises(ValidationError, match="must be strictly positive"):
        hub.text_generation(PROMPT, temperature=-1.0)


def test_inference_client_chat(hub: InferenceClient) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    plain = hub.chat_completion(messages, model="tgi", max_tokens=16, temperature=0, seed=1)
    chunks = hub.chat_completion(messages, model="tgi", max_tokens=16, temperature=0, seed=1, stream=True)

    text = plain.choices[0].message.content
    assert "Paris" in (text or "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text


def test_inference_client_grammar(hub: InferenceClient) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}

    text = hub.text_generation(
        f"{PROMPT} written as JSON:",
        max_new_tokens=60,
        return_full_text=False,
        grammar={"type": "json", "value": schema},
    )
    answer = hub.chat_completion(
        [{"role": "user", "content": "The capital of France, as JSON?"}],
        model="tgi",
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema}},
    )

    assert set(json.loads(text)) == {"city"}
    assert set(json.loads(answer.choices[0].message.content or "")) == {"city"}


def test_four_asynchronous_inference_clients(tgi_server: Server) -> None:
    """The shape of TGI's own test of its Neuron images."""

    async def ask() -> list[Any]:
        async with AsyncInferenceClient(tgi_server.url, timeout=PATIENCE) as hub:
            calls = [hub.text_generation(PROMPT, max_new_tokens=17, details=True) for _ in range(4)]
            return list(await asyncio.gather(*calls))

    answers = asyncio.run(ask())

    assert {answer.details.generated_tokens for answer in answers} == {17}
    assert len({answer.generated_text for answer in answers}) == 1


QUESTION = '{"inputs":"What is Deep Learning?","parameters":{"max_new_tokens":20}}'


def documented_curl(tgi_server: Server, route: str) -> str:
    """The documents' line, at this server's address."""
    command = ["curl", "-s", f"{tgi_server.url}/{route}", "-X", "POST", "-d", QUESTION]
    command += ["-H", "Content-Type: application/json"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE).stdout


def test_the_documents_curl_lines(tgi_server: Server) -> None:
    text = json.loads(documented_curl(tgi_server, "generate"))["generated_text"]
    events = [
        json.loads(line) for line in re.findall(r"^data: (.+)$", documented_curl(tgi_server, "generate_stream"), re.M)
    ]

    assert text
    assert len(events) == 20
    assert events[-1]["generated_text"] == text


def test_the_sagemaker_predictor_s_payload(tgi_server: Server) -> None:
    """The Zephyr tutorial's, with a prompt of this model's chat form."""
    prompt = "<|im_start|>user\nCan you tell me an interesting fact about AWS?<|im_end|>\n<|im_start|>assistant\n"
    payload = {
        "do_sample": True,
        "top_p": 0.6,
        "temperature": 0.9,
        "top_k": 50,
        "max_new_tokens": 24,
        "repetition_penalty": 1.03,
        "return_full_text": False,
        "stop": ["</s>"],
    }

    answer = requests.post(
        f"{tgi_server.url}/invocations", json={"inputs": prompt, "parameters": payload}, timeout=PATIENCE
    )
    chat = requests.post(
        f"{tgi_server.url}/invocations",
        json={"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4},
        timeout=PATIENCE,
    )

    assert answer.status_code == 200
    assert not answer.json()[0]["generated_text"].startswith(prompt)
    assert chat.json()["choices"][0]["message"]["role"] == "assistant"
