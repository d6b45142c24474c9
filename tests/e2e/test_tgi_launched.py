"""A server with TGI's settings, as the launcher makes them: any model name, small limits, a key."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ..tools.server import PATIENCE, VLLM, Server, clean_environment, free_port
from .tgi_client import PROMPT, events

KEY = "s3cret"
SETTINGS = {
    "model_id": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "model_pipeline_tag": "text2text-generation",
    "max_concurrent_requests": 2,
    "max_best_of": 1,
    "max_input_tokens": 64,
    "max_total_tokens": 128,
    "max_client_batch_size": 2,
    "payload_limit": 10_000,
    "disable_grammar_support": True,
    "enable_prefill_logprobs": False,
    "any_model_name": True,
}


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    words = ["--device", "neuron", "--host", "127.0.0.1", "--served-model-name", "ours", "--max-model-len", "256"]
    command = [VLLM, "serve", str(smollm2), "--port", str(port), *words, "--max-num-seqs", "4", "--api-key", KEY]
    command += ["--neuronserve", json.dumps({"tgi": SETTINGS})]
    server = Server(command, port, tmp_path_factory.mktemp("launched") / "log")
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


def post(server: Server, path: str, body: Any, key: str = KEY) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=PATIENCE)


@pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream", "/invocations", "/tokenize", "/vertex"])
def test_without_the_key(server: Server, path: str) -> None:
    response = post(server, path, {"inputs": PROMPT}, key="wrong")
    assert (response.status_code, response.content) == (401, b"")


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/info", "/metrics", "/docs"])
def test_what_may_be_read_without_it(server: Server, path: str) -> None:
    assert httpx.get(f"{server.url}{path}", timeout=PATIENCE).status_code == 200


def test_info(server: Server) -> None:
    info = httpx.get(f"{server.url}/info", timeout=PATIENCE).json()
    shown = {name: value for name, value in SETTINGS.items() if name in info}
    assert {name: info[name] for name in shown} == shown


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"best_of": 2, "do_sample": True}, "`best_of` != 1 is not allowed for this endpoint"),
        ({"truncate": 65}, "`truncate` must be strictly positive and less than 64. Given: 65"),
        ({"grammar": {"type": "regex", "value": "a"}}, "grammar is not supported"),
        (
            {"max_new_tokens": 124},
            "`inputs` tokens + `max_new_tokens` must be <= 128. Given: 5 `inputs` tokens and 124 `max_new_tokens`",
        ),
    ],
)
def test_its_own_limits(server: Server, parameters: dict[str, Any], message: str) -> None:
    response = post(server, "/generate", {"inputs": PROMPT, "parameters": parameters})
    assert response.json() == {"error": f"Input validation error: {message}", "error_type": "validation"}


def test_an_input_longer_than_inputs_may_be(server: Server) -> None:
    response = post(server, "/generate", {"inputs": "one " * 69 + "two", "parameters": {"max_new_tokens": 1}})
    assert response.json()["error"] == "Input validation error: `inputs` must have less than 64 tokens. Given: 70"


def test_other_models_do_not_return_the_prompt_by_default(server: Server) -> None:
    (answer,) = post(server, "/", {"inputs": PROMPT, "parameters": {"max_new_tokens": 3}}).json()
    assert PROMPT not in answer["generated_text"]


def test_prefill_stays_empty_where_it_is_turned_off(server: Server) -> None:
    parameters = {"max_new_tokens": 1, "decoder_input_details": True}
    assert post(server, "/generate", {"inputs": PROMPT, "parameters": parameters}).json()["details"]["prefill"] == []


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/invocations"])
def test_a_body_that_is_too_large(server: Server, path: str) -> None:
    response = post(server, path, {"inputs": "a" * 10_000, "prompt": ""})
    assert (response.status_code, response.text) == (413, "Failed to buffer the request body: length limit exceeded")


def test_a_full_house(server: Server) -> None:
    """Of many at once the first two are let in; whoever finds no place is told at once, and a place comes back."""
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 120}}
    refused: list[httpx.Response] = []
    with ThreadPoolExecutor(8) as clients:
        while len({response.request.url.path for response in refused}) < 2:
            asked = [clients.submit(post, server, path, body) for path in ("/generate", "/generate_stream") * 4]
            refused += [answer for answer in (future.result() for future in asked) if "overloaded" in answer.text]
    for response in refused:
        if response.request.url.path == "/generate":
            assert (response.status_code, response.json()) == (429, BUSY)
        else:
            assert (response.status_code, events(response)) == (200, [BUSY])
    assert post(server, "/generate", body).status_code == 200


BUSY = {"error": "Model is overloaded", "error_type": "overloaded"}


NUMBERS = {
    "x-compute-characters",
    "x-total-time",
    "x-validation-time",
    "x-queue-time",
    "x-inference-time",
    "x-time-per-token",
    "x-prompt-tokens",
    "x-generated-tokens",
}


def of_tgi(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name.startswith("x-")}


TOO_MUCH = "`inputs` tokens + `max_new_tokens` must be <= 128. Given: {length} `inputs` tokens"


class TestOpenAi:
    @pytest.mark.parametrize("model", ["tgi", "dummy", "ours", None])
    def test_any_model_name(self, server: Server, model: str | None) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "model": model}
        response = post(server, "/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == "ours"

    @pytest.mark.parametrize("path", ["/v1/completions", "/invocations"])
    def test_headers_of_a_completion(self, server: Server, path: str) -> None:
        body = {"prompt": [PROMPT, "ab"], "max_tokens": 3, "temperature": 0}
        answer = post(server, path, body)
        found, usage = of_tgi(answer), answer.json()["usage"]
        assert found.keys() == {*NUMBERS, "x-compute-type"}
        assert found["x-compute-type"] == "1-cpu"
        assert found["x-compute-characters"] == str(len(PROMPT) + 2)
        assert found["x-prompt-tokens"] == str(usage["prompt_tokens"])
        assert found["x-generated-tokens"] == str(usage["completion_tokens"]) == "6"
        assert int(found["x-inference-time"]) >= int(found["x-time-per-token"]) > 0
        parts = sum(int(found[f"x-{part}-time"]) for part in ("validation", "queue", "inference"))
        assert 0 <= int(found["x-total-time"]) - parts <= 3  # each is cut to whole milliseconds

    def test_headers_of_a_chat(self, server: Server) -> None:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
        found = of_tgi(post(server, "/v1/chat/completions", body))
        assert found.keys() == {*NUMBERS, "x-compute-type", "x-compute-time"}
        templated = post(server, "/chat_tokenize", body).json()["templated_text"]
        assert found["x-compute-characters"] == str(len(templated))
        assert int(float(found["x-compute-time"]) * 1000) == int(found["x-total-time"])

    @pytest.mark.parametrize("path", ["/v1/completions", "/invocations"])
    def test_headers_of_a_stream(self, server: Server, path: str) -> None:
        stream = post(server, path, {"prompt": PROMPT, "max_tokens": 3, "stream": True})
        characters = str(len(PROMPT))
        expected = {"x-compute-type": "1-cpu", "x-compute-characters": characters, "x-accel-buffering": "no"}
        assert of_tgi(stream) == expected

    def test_vllm_s_refusals_are_counted(self, server: Server) -> None:
        def failures() -> float:
            text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
            lines = [line for line in text.splitlines() if line.startswith('tgi_request_failure{err="validation"}')]
            return float(lines[0].split()[-1]) if lines else 0.0

        before = failures()
        refused = post(server, "/v1/completions", {"prompt": PROMPT, "temperature": -1})
        assert refused.status_code == 400
        assert failures() == before + 1

    def test_a_completion_uses_the_whole_context(self, server: Server) -> None:
        body = {"model": "tgi", "prompt": "1 2 3 4 5 6", "temperature": 0}
        answer = post(server, "/v1/completions", body).json()
        assert answer["usage"]["completion_tokens"] > 16

    def test_a_reply_is_continued(self, server: Server) -> None:
        messages = [{"role": "user", "content": "Count."}, {"role": "assistant", "content": "1, 2, 3,"}]
        body = {"model": "tgi", "messages": messages, "max_tokens": 4, "temperature": 0}
        reply = post(server, "/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        assert reply.strip().startswith("4")

    @pytest.mark.parametrize(
        ("words", "asked", "message"),
        [
            (69, {}, "`inputs` must have less than 64 tokens. Given: {length}"),
            (69, {"max_tokens": 100}, f"{TOO_MUCH} and 100 `max_new_tokens`"),
            (400, {}, f"{TOO_MUCH} and 0 `max_new_tokens`"),  # longer than the engine could read
            (400, {"max_tokens": 100}, f"{TOO_MUCH} and 100 `max_new_tokens`"),
        ],
    )
    @pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/invocations"])
    def test_its_own_limits(self, server: Server, path: str, words: int, asked: dict[str, int], message: str) -> None:
        text = "one " * words + "two"
        prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        length = post(server, "/tokenize", prompt).json()["count"]
        response = post(server, path, {**prompt, "stream": True, **asked})
        assert response.status_code == 422, response.text
        assert response.json() == {
            "error": f"Input validation error: {message.format(length=length)}",
            "error_type": "validation",
        }

    def test_an_answer_ends_at_the_total(self, server: Server) -> None:
        body = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True}
        assert post(server, "/v1/completions", body).json()["usage"]["total_tokens"] == 128
        chat = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "ignore_eos": True}
        assert post(server, "/v1/chat/completions", chat).json()["usage"]["total_tokens"] == 128

    @pytest.mark.parametrize(
        ("body", "error_type"),
        [
            ({"prompt": "a", "suffix": "b"}, "suffix not supported"),
            ({"prompt": ["a", "b", "c"]}, "batch size exceeded"),
        ],
    )
    def test_refused_in_tgi_s_words(self, server: Server, body: dict[str, Any], error_type: str) -> None:
        response = post(server, "/v1/completions", body)
        assert (response.status_code, response.json()["error_type"]) == (422, error_type)


def chat(path: str, text: str, max_tokens: int) -> dict[str, Any]:
    """A body of one of vLLM's other routes."""
    messages = [{"role": "user", "content": text}]
    if path == "/v1/responses":
        return {"input": text, "max_output_tokens": max_tokens}
    return {"messages": [messages] if path.endswith("batch") else messages, "max_tokens": max_tokens}


class TestOtherRoutes:
    """vLLM's routes that TGI never had."""

    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions/batch"])
    def test_within_the_limits_they_answer(self, server: Server, path: str) -> None:
        response = post(server, path, {"model": "tgi", **chat(path, "Hi", 3)})
        assert response.status_code == 200, response.text
        assert response.json()["model"] == "ours"

    @pytest.mark.parametrize(
        ("words", "max_tokens", "message"),
        [(70, 1, "`inputs` must have less than 64 tokens"), (1, 127, "`max_new_tokens` must be <= 128")],
    )
    @pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/chat/completions/batch"])
    def test_beyond_them_they_refuse(
        self, server: Server, path: str, words: int, max_tokens: int, message: str
    ) -> None:
        response = post(server, path, chat(path, "one " * words, max_tokens))
        assert response.status_code == (400 if path == "/v1/messages" else 422), response.text
        assert message in response.text

    @pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages", "/detokenize"])
    def test_a_body_that_is_too_large(self, server: Server, path: str) -> None:
        assert post(server, path, {"input": "a" * 10_000}).status_code == 413

    @pytest.mark.parametrize("path", ["/inference/v1/generate", "/generative_scoring", "/v1/systemone"])
    def test_what_knows_no_limits_is_refused_by_name(self, server: Server, path: str) -> None:
        response = post(server, path, {"model": "ours", "token_ids": [1], "sampling_params": {}})
        assert (response.status_code, path in response.text) == (400, True)

    def test_no_spelling_of_a_grammar_passes(self, server: Server) -> None:
        body = {**chat("/v1/chat/completions", "Hi", 3), "response_format": {"type": "json_object"}}
        assert post(server, "/v1/chat/completions", body).json() == {
            "error": "Input validation error: grammar is not supported",
            "error_type": "validation",
        }

    def test_an_empty_list_of_prompts(self, server: Server) -> None:
        response = post(server, "/v1/completions", {"prompt": []})
        assert (response.status_code, "Empty array detected" in response.text) == (422, True)


WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "unit": {"enum": ["celsius", "fahrenheit"]}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
}
TIME = {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [{"type": "function", "function": function} for function in (WEATHER, TIME)]
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]


class TestTools:
    """On the launcher's own server, with nothing said of tools on its command line, by a model that knows none."""

    def answer(self, tgi_server: Server, **asked: Any) -> Any:
        body = {"model": "tgi", "messages": QUESTION, "tools": TOOLS, "temperature": 0, "max_tokens": 200, **asked}
        response = httpx.post(f"{tgi_server.url}/v1/chat/completions", json=body, timeout=PATIENCE)
        assert response.status_code == 200, response.text
        return response.json()

    def ask(self, tgi_server: Server, **asked: Any) -> dict[str, Any]:
        (choice,) = self.answer(tgi_server, **asked)["choices"]
        message: dict[str, Any] = choice["message"]
        return message

    def test_the_model_reads_of_its_tools_though_its_template_has_no_place_for_them(self, tgi_server: Server) -> None:
        def num_read(**asked: Any) -> int:
            return int(self.answer(tgi_server, max_tokens=1, **asked)["usage"]["prompt_tokens"])

        without = num_read(tools=None)
        assert num_read(tool_choice="none") == num_read(tools=[]) == without
        assert num_read() > without + 100

    @pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": None}, {"tool_choice": "none"}])
    def test_an_answer_is_free_to_call_none(self, tgi_server: Server, choice: dict[str, Any]) -> None:
        message = self.ask(tgi_server, max_tokens=20, **choice)
        assert message["content"] or message["tool_calls"]

    @pytest.mark.parametrize("choice", ["get_weather", {"type": "function", "function": {"name": "get_weather"}}])
    def test_a_named_function_is_called(self, tgi_server: Server, choice: Any) -> None:
        (call,) = self.ask(tgi_server, tool_choice=choice)["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        arguments = json.loads(call["function"]["arguments"])
        assert arguments.keys() == {"city", "unit"}
        assert arguments["city"] in ("Paris", "Rome")

    def test_some_function_is_called_where_one_is_required(self, tgi_server: Server) -> None:
        (call,) = self.ask(tgi_server, tool_choice="required")["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert (call["function"]["name"], len(arguments)) in (("get_weather", 2), ("get_time", 0))

    def test_a_stream_calls_what_a_whole_answer_calls(self, tgi_server: Server) -> None:
        client = openai.OpenAI(base_url=f"{tgi_server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
        asked: Any = {"model": "tgi", "messages": QUESTION, "tools": TOOLS, "temperature": 0, "max_tokens": 200}
        chunks = list(client.chat.completions.create(**asked, tool_choice="required", stream=True))
        pieces = [call.function for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
        (call,) = self.ask(tgi_server, tool_choice="required")["tool_calls"]
        assert "".join(piece.name or "" for piece in pieces) == call["function"]["name"]
        assert json.loads("".join(piece.arguments or "" for piece in pieces)) == json.loads(
            call["function"]["arguments"]
        )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--neuronserve.tgi.max_best", "3"], "neuronserve.tgi.max_best: no such setting; did you mean max_best_of?"),
        (["--neuronserve", '{"tgi": {"max_best_of": 0}}'], "neuronserve.tgi.max_best_of=0: expected a whole number"),
    ],
)
def test_a_wrong_setting_is_refused_at_the_start(smollm2: Path, flags: list[str], message: str) -> None:
    command = [VLLM, "serve", str(smollm2), "--port", str(free_port()), "--device", "neuron", *flags]
    done = subprocess.run(
        command, capture_output=True, text=True, env=clean_environment(), timeout=PATIENCE, check=False
    )
    assert done.returncode != 0
    assert message in done.stderr.splitlines()[-1]
