"""Golden exchanges with TGI's routes on a server that `vllm serve` started: status, headers, body, event by event."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest

from ..server.tgi.test_validation import REFUSED, STREAMED
from ..tools.server import PATIENCE, Server
from .conftest import LENGTH, MODEL
from .tgi_client import PROMPT, events, generate, post, stream

JSON = {"content-type": "application/json"}
INVALID = "Input validation error: "
TIMES = ("x-total-time", "x-validation-time", "x-queue-time", "x-inference-time", "x-time-per-token")


class TestWhole:
    def test_the_answer(self, server: Server) -> None:
        response = post(server, "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 6}})
        assert response.status_code == 200
        assert response.headers["content-type"] == "application/json"
        assert list(response.json()) == ["generated_text"]

    def test_its_headers(self, server: Server) -> None:
        headers = post(server, "/generate", {"inputs": "Hé", "parameters": {"max_new_tokens": 3}}).headers
        assert headers["x-compute-type"] == "1-cpu"
        assert headers["x-compute-characters"] == "2"
        assert headers["x-generated-tokens"] == "3"
        assert float(headers["x-compute-time"]) > 0
        times = {name: int(headers[name]) for name in TIMES}
        parts = times["x-validation-time"] + times["x-queue-time"] + times["x-inference-time"]
        assert 0 <= times["x-total-time"] - parts <= 3  # each is rounded down
        assert "x-accel-buffering" not in headers

    def test_details(self, server: Server) -> None:
        answer = generate(server, max_new_tokens=6, details=True)
        details = answer["details"]
        assert list(details) == ["finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
        assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 6, None)
        assert details["prefill"] == []
        assert [list(token) for token in details["tokens"]] == [["id", "text", "logprob", "special"]] * 6
        assert "".join(token["text"] for token in details["tokens"]) == answer["generated_text"]

    def test_decoder_input_details(self, server: Server) -> None:
        prefill = generate(server, max_new_tokens=1, decoder_input_details=True)["details"]["prefill"]
        assert "".join(token["text"] for token in prefill) == PROMPT
        assert prefill[0]["logprob"] is None
        assert all(token["logprob"] < 0 for token in prefill[1:])

    def test_truncate_keeps_the_end(self, server: Server) -> None:
        answer = generate(server, max_new_tokens=4, truncate=2, decoder_input_details=True, return_full_text=True)
        assert [token["text"] for token in answer["details"]["prefill"]] == [" was", " quiet"]
        assert answer["generated_text"] == PROMPT + generate(server, " was quiet", max_new_tokens=4)["generated_text"]

    def test_top_n_tokens(self, server: Server) -> None:
        details = generate(server, max_new_tokens=3, details=True, top_n_tokens=3)["details"]
        assert list(details)[-1] == "top_tokens"
        for token, best in zip(details["tokens"], details["top_tokens"], strict=True):
            assert best[0] == token  # greedy
            assert len(best) == 3
            assert [one["logprob"] for one in best] == sorted((one["logprob"] for one in best), reverse=True)

    def test_what_a_warper_rules_out_is_not_among_the_top(self, server: Server) -> None:
        details = generate(server, max_new_tokens=3, details=True, top_n_tokens=5, top_k=2, seed=1)["details"]
        assert [len(best) for best in details["top_tokens"]] == [2, 2, 2]

    def test_best_of(self, server: Server) -> None:
        answer = generate(server, max_new_tokens=6, best_of=2, do_sample=True, details=True)
        details = answer["details"]
        assert list(details)[-1] == "best_of_sequences"
        (other,) = details["best_of_sequences"]
        assert list(other) == ["generated_text", "finish_reason", "generated_tokens", "seed", "prefill", "tokens"]
        assert details["seed"] != other["seed"]
        assert mean_logprob(details) >= mean_logprob(other)
        for sequence, text in ((details, answer["generated_text"]), (other, other["generated_text"])):
            assert generate(server, max_new_tokens=6, do_sample=True, seed=sequence["seed"])["generated_text"] == text

    def test_a_drawn_seed_is_told_and_makes_the_same_again(self, server: Server) -> None:
        answer = generate(server, max_new_tokens=8, do_sample=True, details=True)
        again = generate(server, max_new_tokens=8, do_sample=True, details=True, seed=answer["details"]["seed"])
        assert again == answer

    def test_the_largest_seed(self, server: Server) -> None:
        details = generate(server, max_new_tokens=2, do_sample=True, details=True, seed=2**64 - 1)["details"]
        assert details["seed"] == 2**64 - 1

    def test_without_parameters_it_samples_with_empty_ones_it_does_not(self, server: Server) -> None:
        empty = post(server, "/generate", {"inputs": "Once", "parameters": {"details": True, "max_new_tokens": 2}})
        assert empty.json()["details"]["seed"] is None
        assert len({beginning(server, {"inputs": "Once"}) for _ in range(4)}) > 1
        assert len({beginning(server, {"inputs": "Once", "parameters": {}}) for _ in range(4)}) == 1

    def test_no_number_of_tokens_is_all_that_is_left(self, server: Server) -> None:
        details = generate(server, "word " * (LENGTH - 40), details=True)["details"]
        assert details["finish_reason"] in ("length", "eos_token")
        if details["finish_reason"] == "length":
            assert details["generated_tokens"] == LENGTH - len(tokens(server, "word " * (LENGTH - 40)))

    def test_a_stop_sequence_stays_in(self, server: Server) -> None:
        whole = generate(server, max_new_tokens=12, details=True)
        stop = whole["details"]["tokens"][4]["text"]
        answer = generate(server, max_new_tokens=12, details=True, stop=[stop])
        assert answer["generated_text"].endswith(stop)
        assert answer["details"]["finish_reason"] == "stop_sequence"
        assert answer["details"]["generated_tokens"] <= 5
        assert whole["generated_text"].startswith(answer["generated_text"])

    def test_a_stop_sequence_inside_a_token_does_not_match(self, server: Server) -> None:
        whole = generate(server, max_new_tokens=8, details=True)
        middle = next(t["text"][1:-1] for t in whole["details"]["tokens"] if len(t["text"]) > 4)
        assert not any(token["text"].endswith(middle) for token in whole["details"]["tokens"])
        assert generate(server, max_new_tokens=8, stop=[middle])["generated_text"] == whole["generated_text"]

    def test_the_end_of_text_is_a_token_and_no_text(self, server: Server) -> None:
        chat = post(server, "/chat_tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()[
            "templated_text"
        ]
        answer = generate(server, chat, max_new_tokens=64, details=True)
        last = answer["details"]["tokens"][-1]
        assert answer["details"]["finish_reason"] == "eos_token"
        assert (last["text"], last["special"]) == ("<|im_end|>", True)
        assert "<|im_end|>" not in answer["generated_text"]

    @pytest.mark.parametrize(
        ("grammar", "start"),
        [
            ({"type": "regex", "value": "[0-9]{3}"}, ""),
            ({"type": "json", "value": {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}}, "{"),
        ],
    )
    def test_a_grammar(self, server: Server, grammar: dict[str, Any], start: str) -> None:
        text = generate(server, "Number:", max_new_tokens=30, grammar=grammar)["generated_text"]
        assert text.startswith(start)
        assert text.isdigit() or "1" in text

    def test_parameters_that_only_tgi_has(self, server: Server) -> None:
        plain = generate(server, max_new_tokens=24)["generated_text"]
        assert generate(server, max_new_tokens=24, frequency_penalty=2.0, repetition_penalty=1.3) != plain
        one = generate(server, max_new_tokens=8, typical_p=0.2, seed=5, details=True)
        assert one == generate(server, max_new_tokens=8, typical_p=0.2, seed=5, details=True)


def beginning(server: Server, body: Any) -> str:
    """The first eight tokens of a stream; then the client leaves."""
    with httpx.stream("POST", f"{server.url}/generate_stream", json=body, timeout=PATIENCE) as response:
        data = (json.loads(line[6:]) for line in response.iter_lines() if line)
        return "".join(next(data)["token"]["text"] for _ in range(8))


def mean_logprob(sequence: dict[str, Any]) -> float:
    scores = [token["logprob"] for token in sequence["tokens"]]
    return float(sum(scores) / len(scores))


def tokens(server: Server, text: str) -> list[Any]:
    found: list[Any] = post(server, "/tokenize", {"inputs": text}).json()
    return found


class TestStream:
    def test_event_by_event(self, server: Server) -> None:
        whole = generate(server, max_new_tokens=5, details=True)
        response = post(
            server, "/generate_stream", {"inputs": PROMPT, "parameters": {"max_new_tokens": 5, "details": True}}
        )
        assert response.status_code == 200
        assert response.headers["content-type"] == "text/event-stream"
        assert response.headers["cache-control"] == "no-cache"
        assert response.headers["x-accel-buffering"] == "no"
        assert response.headers["x-compute-characters"] == str(len(PROMPT))
        assert "x-compute-time" not in response.headers
        found = events(response)
        assert [list(event) for event in found] == [["index", "token", "generated_text", "details"]] * 5
        assert [event["index"] for event in found] == [1, 2, 3, 4, 5]
        assert [event["token"] for event in found] == whole["details"]["tokens"]
        assert [(event["generated_text"], event["details"]) for event in found[:-1]] == [(None, None)] * 4
        assert found[-1]["generated_text"] == whole["generated_text"]
        assert found[-1]["details"] == {
            "finish_reason": "length",
            "generated_tokens": 5,
            "seed": None,
            "input_length": 5,
        }

    def test_without_details(self, server: Server) -> None:
        last = stream(server, max_new_tokens=2)[-1]
        assert last["generated_text"]
        assert last["details"] is None

    def test_top_tokens(self, server: Server) -> None:
        found = stream(server, max_new_tokens=2, top_n_tokens=2)
        assert [list(event) for event in found] == [["index", "token", "top_tokens", "generated_text", "details"]] * 2

    def test_full_text_in_the_last_event(self, server: Server) -> None:
        found = stream(server, max_new_tokens=3, return_full_text=True)
        assert found[-1]["generated_text"] == PROMPT + "".join(event["token"]["text"] for event in found)

    def test_half_a_character_is_no_text_yet(self, server: Server) -> None:
        found = stream(server, "Emoji: 😀 😃 😄 😁 😆", max_new_tokens=24)
        text = "".join(event["token"]["text"] for event in found)
        assert "\ufffd" not in text
        assert found[-1]["generated_text"] == text
        assert len(found) == 24

    def test_an_error_is_an_event(self, server: Server) -> None:
        response = post(server, "/generate_stream", {"inputs": ""})
        assert response.status_code == 200
        assert response.text == (
            'data: {"error":"Input validation error: `inputs` cannot be empty","error_type":"validation"}\n\n'
        )

    def test_a_body_of_another_shape_is_none(self, server: Server) -> None:
        assert post(server, "/generate_stream", {"inputs": 5}).status_code == 422


class TestCompat:
    @pytest.mark.parametrize("path", ["/", "/invocations"])
    def test_a_list_of_one_with_the_prompt_in_it(self, server: Server, path: str) -> None:
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 4}}
        response = post(server, path, body)
        assert response.json() == [{"generated_text": PROMPT + generate(server, max_new_tokens=4)["generated_text"]}]
        assert response.headers["x-generated-tokens"] == "4"

    @pytest.mark.parametrize("path", ["/", "/invocations"])
    def test_unless_told_otherwise(self, server: Server, path: str) -> None:
        body = {"inputs": PROMPT, "parameters": {"max_new_tokens": 4, "return_full_text": False}}
        assert post(server, path, body).json() == [generate(server, max_new_tokens=4)]

    @pytest.mark.parametrize("path", ["/", "/invocations"])
    def test_a_stream_where_asked(self, server: Server, path: str) -> None:
        parameters = {"max_new_tokens": 3, "return_full_text": False}
        found = events(post(server, path, {"inputs": PROMPT, "parameters": parameters, "stream": True}))
        assert found == stream(server, max_new_tokens=3)


class TestRefusals:
    @pytest.mark.parametrize(("parameters", "message"), REFUSED)
    def test_whole(self, server: Server, parameters: dict[str, Any], message: str) -> None:
        response = post(server, "/generate", {"inputs": PROMPT, "parameters": parameters})
        assert response.status_code == 422
        assert response.headers["content-type"] == "application/json"
        assert response.json() == {"error": INVALID + message, "error_type": "validation"}
        assert "x-compute-type" not in response.headers

    @pytest.mark.parametrize(("parameters", "message"), STREAMED)
    def test_streamed(self, server: Server, parameters: dict[str, Any], message: str) -> None:
        assert stream(server, **parameters) == [{"error": INVALID + message, "error_type": "validation"}]

    def test_an_input_that_is_too_long(self, server: Server) -> None:
        text = "word " * LENGTH
        num = len(tokens(server, text))
        response = post(server, "/generate", {"inputs": text, "parameters": {"max_new_tokens": 5}})
        assert response.json()["error"] == (
            f"{INVALID}`inputs` tokens + `max_new_tokens` must be <= {LENGTH}. "
            f"Given: {num} `inputs` tokens and 5 `max_new_tokens`"
        )

    def test_too_many_new_tokens(self, server: Server) -> None:
        response = post(server, "/generate", {"inputs": PROMPT, "parameters": {"max_new_tokens": 10_000}})
        assert response.json()["error"] == (
            f"{INVALID}`inputs` tokens + `max_new_tokens` must be <= {LENGTH}. "
            "Given: 5 `inputs` tokens and 10000 `max_new_tokens`"
        )

    @pytest.mark.parametrize(
        ("grammar", "message"),
        [
            ({"type": "regex", "value": "[0-9"}, "grammar is not valid: "),
            ({"type": "json", "value": {}}, "grammar is not valid: Grammar must have a 'properties' field"),
            ({"type": "json", "value": 5}, "grammar is not supported"),
            (
                {"type": "json", "value": {"properties": {"a": {"$ref": "#/nowhere"}}}},
                "cannot compile regex from schema: ",
            ),
        ],
    )
    def test_grammars(self, server: Server, grammar: dict[str, Any], message: str) -> None:
        response = post(server, "/generate", {"inputs": PROMPT, "parameters": {"grammar": grammar}})
        assert response.status_code == 422
        assert response.json()["error"].startswith(INVALID + message)


class TestTransport:
    @pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream", "/tokenize", "/invocations", "/vertex"])
    @pytest.mark.parametrize(
        ("sent", "status", "text"),
        [
            ({"data": {"inputs": "a"}}, 415, "Expected request with `Content-Type: application/json`"),
            ({"content": b'{"inputs": "a"}'}, 415, "Expected request with `Content-Type: application/json`"),
            (
                {"content": b"{", "headers": JSON},
                400,
                "Failed to parse the request body as JSON: EOF while parsing an object at line 1 column 1",
            ),
            (
                {"content": b'"' + b"a" * 2_000_000, "headers": JSON},
                413,
                "Failed to buffer the request body: length limit exceeded",
            ),
        ],
    )
    def test_what_is_no_json(self, server: Server, path: str, sent: Any, status: int, text: str) -> None:
        response = post(server, path, **sent)
        assert (response.status_code, response.text) == (status, text)
        assert response.headers["content-type"] == "text/plain; charset=utf-8"

    @pytest.mark.parametrize("path", ["/", "/generate", "/generate_stream", "/tokenize"])
    def test_a_field_is_missing(self, server: Server, path: str) -> None:
        response = post(server, path, content=b"{}", headers=JSON)
        assert (response.status_code, response.text) == (
            422,
            "Failed to deserialize the JSON body into the target type: missing field `inputs` at line 1 column 2",
        )
        assert response.headers["content-type"] == "text/plain; charset=utf-8"

    @pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/vertex", "/chat_tokenize", "/tokenize"])
    def test_another_method(self, server: Server, path: str) -> None:
        response = httpx.get(f"{server.url}{path}", timeout=PATIENCE)
        assert (response.status_code, response.content, response.headers["allow"]) == (405, b"", "POST")


class TestOthers:
    @pytest.mark.parametrize("path", ["/", "/health", "/ping"])
    @pytest.mark.parametrize("method", ["GET", "HEAD"])
    def test_health(self, server: Server, method: str, path: str) -> None:
        response = httpx.request(method, f"{server.url}{path}", timeout=PATIENCE)
        assert (response.status_code, response.content) == (200, b"")

    def test_info(self, server: Server) -> None:
        info = httpx.get(f"{server.url}/info", timeout=PATIENCE).json()
        assert re.fullmatch(r"neuronserve-[\d.]+-cpu", info.pop("docker_label"))
        assert info == {
            "model_id": MODEL,
            "model_sha": None,
            "model_pipeline_tag": None,
            "max_concurrent_requests": 128,
            "max_best_of": 2,
            "max_stop_sequences": 4,
            "max_input_tokens": LENGTH - 1,
            "max_total_tokens": LENGTH,
            "validation_workers": 2,
            "max_client_batch_size": 4,
            "router": "text-generation-router",
            "version": "3.3.6-dev0",
            "sha": None,
        }

    def test_tokenize(self, server: Server) -> None:
        assert tokens(server, "Hé old") == [
            {"id": 56, "text": "H", "start": 0, "stop": 1},
            {"id": 2756, "text": "é", "start": 1, "stop": 3},
            {"id": 1573, "text": " old", "start": 3, "stop": 7},
        ]

    def test_chat_tokenize(self, server: Server) -> None:
        answer = post(server, "/chat_tokenize", {"messages": [{"role": "user", "content": "Hi"}]}).json()
        assert answer["templated_text"].endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert "".join(token["text"] for token in answer["tokenize_response"]) == answer["templated_text"]

    def test_a_chat_that_its_template_refuses(self, server: Server) -> None:
        response = post(server, "/chat_tokenize", {"messages": []})
        assert response.status_code == 422
        assert response.json()["error_type"] == "template_error"
        assert response.json()["error"].startswith("Template error: ")

    def test_vertex(self, server: Server) -> None:
        instance = {"inputs": PROMPT, "parameters": {"max_new_tokens": 4, "seed": 3, "top_k": 1}}
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
        first, _ = post(server, "/vertex", {"instances": [instance, chat]}).json()["predictions"]
        assert first == generate(server, max_new_tokens=4, seed=3, do_sample=True)["generated_text"]

    @pytest.mark.parametrize(
        ("instances", "status", "body"),
        [
            ([], 422, {"error": "Input validation error", "error_type": "Input validation error"}),
            # TGI says 500 `Incomplete generation` of whatever is wrong with an instance.
            (
                [{"inputs": ""}],
                422,
                {"error": "Input validation error: `inputs` cannot be empty", "error_type": "validation"},
            ),
        ],
    )
    def test_vertex_refused(self, server: Server, instances: Any, status: int, body: Any) -> None:
        response = post(server, "/vertex", {"instances": instances})
        assert (response.status_code, response.json()) == (status, body)

    def test_the_openapi_page_has_our_routes(self, server: Server) -> None:
        ours = httpx.get(f"{server.url}/api-doc/openapi.json", timeout=PATIENCE).json()
        assert ours["info"]["title"] == "Text Generation Inference"
        assert set(ours["paths"]) <= set(httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE).json()["paths"])
        assert httpx.get(f"{server.url}/docs", timeout=PATIENCE).status_code == 200
