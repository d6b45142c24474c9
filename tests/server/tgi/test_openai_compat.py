"""Bodies of TGI's clients, and what vLLM gets of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from neuronserve.server.tgi.admission import Admission
from neuronserve.server.tgi.errors import TgiError, TransportError
from neuronserve.server.tgi.metrics import Recorder
from neuronserve.server.tgi.openai_compat import OpenAiCompat, Rules, num_answers, rewrite
from neuronserve.server.tgi.openai_limits import UNSAID
from neuronserve.server.tgi.validation import Limits

LIMITS = Limits(2, 4, 5, 1023, 1024)
VLLM = Rules(("served", "alias"), LIMITS)
LAUNCHER = Rules(("served", "alias"), LIMITS, as_launcher=True, max_client_batch_size=2)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
ASKED = [{"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
OPENAI_FORM = {"type": "json_schema", "json_schema": {"name": "response", "schema": SCHEMA}}


@pytest.mark.parametrize(
    "body",
    [
        {"model": "m", "messages": ASKED},
        {"messages": ASKED, "response_format": OPENAI_FORM},
        {"messages": ASKED, "response_format": {"type": "json_object"}},
        {"messages": ASKED, "response_format": {"type": "text"}, "tools": TOOLS, "tool_choice": "auto"},
        {"messages": ASKED, "tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": TOOLS},
        {"messages": ASKED, "logit_bias": {"5": 1.0}},
        {"prompt": "a", "suffix": "b"},
        {"messages": [*ASKED, {"role": "assistant", "content": "I"}]},
        {"messages": "not a list", "response_format": 5, "tools": 5, "tool_choice": 5},
    ],
)
def test_openai_s_own_bodies_pass_as_they_are(body: dict[str, Any]) -> None:
    assert rewrite(body, VLLM) == body


@pytest.mark.parametrize(
    "form",
    [
        {"type": "json", "value": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json_schema", "value": {"name": "n", "schema": SCHEMA}},
    ],
)
@pytest.mark.parametrize("rules", [VLLM, LAUNCHER])
def test_response_format_with_a_value(form: dict[str, Any], rules: Rules) -> None:
    assert rewrite({"model": "served", "messages": ASKED, "response_format": form}, rules) == {
        "model": "served",
        "messages": ASKED,
        "response_format": OPENAI_FORM,
    }


def test_response_format_of_a_regular_expression() -> None:
    body = {"messages": ASKED, "response_format": {"type": "regex", "value": "[0-9]"}}
    assert rewrite(body, VLLM) == {"messages": ASKED, "structured_outputs": {"regex": "[0-9]"}}


def test_a_message_s_empty_fields_are_left_out() -> None:
    message = {"role": "user", "content": None, "name": None, "tool_calls": None}
    assert rewrite({"messages": [message], "max_tokens": None}, VLLM) == {
        "messages": [{"role": "user", "content": None}],
        "max_tokens": None,
    }


def test_a_function_s_bare_name() -> None:
    body = {"messages": ASKED, "tools": TOOLS, "tool_choice": "f"}
    assert rewrite(body, VLLM)["tool_choice"] == {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("body", "message", "error_type"),
    [
        (
            {"messages": ASKED, "tools": [], "response_format": {"type": "json", "value": SCHEMA}},
            "Tool error: Grammar and tools are mutually exclusive",
            "tool_error",
        ),
        (
            {"messages": ASKED, "tools": TOOLS, "tool_choice": "g"},
            "Tool error: Tool with name g not found",
            "tool_error",
        ),
        (
            {"messages": ASKED, "response_format": {"type": "json", "value": {}}},
            "Input validation error: grammar is not valid: Grammar must have a 'properties' field",
            "validation",
        ),
        (
            {"prompt": "a", "suffix": "b"},
            "Suffix is not supported and can be achieved by preprocessing the prompt.",
            "suffix not supported",
        ),
        (
            {"prompt": ["a", "b", "c"]},
            "Number of prompts exceeds the maximum allowed batch size of 2",
            "batch size exceeded",
        ),
    ],
)
def test_refused_in_tgi_s_words(body: dict[str, Any], message: str, error_type: str) -> None:
    with pytest.raises(TgiError) as refused:
        rewrite(body, LAUNCHER)
    assert refused.value.status == 422
    assert refused.value.body == {"error": message, "error_type": error_type}


@pytest.mark.parametrize("rules", [VLLM, LAUNCHER])
@pytest.mark.parametrize(
    "body",
    [
        {"messages": ASKED, "response_format": OPENAI_FORM},
        {"messages": ASKED, "response_format": {"type": "json_object"}},
        {"messages": ASKED, "response_format": {"type": "json", "value": SCHEMA}},
        {"messages": ASKED, "tools": TOOLS},
        {"messages": ASKED, "structured_outputs": {"regex": "a"}},
        {"prompt": "a", "response_format": OPENAI_FORM},
        {"prompt": "a", "structured_outputs": {"json": SCHEMA}},
    ],
)
def test_without_grammars_no_spelling_of_one_passes(body: dict[str, Any], rules: Rules) -> None:
    without = replace(rules, limits=replace(LIMITS, grammar_support=False))
    with pytest.raises(TgiError) as refused:
        rewrite(body, without)
    assert refused.value.body == {
        "error": "Input validation error: grammar is not supported",
        "error_type": "validation",
    }


@pytest.mark.parametrize(
    "body",
    [
        {"messages": ASKED, "response_format": {"type": "text"}},
        {"messages": ASKED, "response_format": None, "tools": TOOLS, "tool_choice": "none"},
        {"prompt": "a", "structured_outputs": None},
    ],
)
def test_without_grammars_plain_text_passes(body: dict[str, Any]) -> None:
    assert rewrite(body, replace(VLLM, limits=replace(LIMITS, grammar_support=False))) == body


def test_an_empty_list_of_prompts() -> None:
    with pytest.raises(TransportError) as refused:
        rewrite({"prompt": []}, LAUNCHER)
    assert (refused.value.status, str(refused.value)) == (
        422,
        "Failed to deserialize the JSON body into the target type: Empty array detected. Do not use an empty array for "
        "the prompt.",
    )
    assert rewrite({"prompt": []}, VLLM) == {"prompt": []}


def test_tools_of_the_launcher_s_server() -> None:
    found = rewrite(
        {"messages": ASKED, "tools": TOOLS, "tool_choice": "f"}, replace(LAUNCHER, template_shows_tools=False)
    )
    assert found["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert found["messages"][-1]["content"].startswith("Hi\n---\n")


@pytest.mark.parametrize(("asked", "served"), [("tgi", "served"), (None, "served"), ("alias", "alias")])
def test_any_model_name_where_the_launcher_started_the_server(asked: str | None, served: str) -> None:
    body = {"messages": ASKED, **({"model": asked} if asked else {})}
    assert rewrite(body, LAUNCHER)["model"] == served
    assert rewrite(body, VLLM) == body


def test_completions_of_the_launcher_s_server_use_the_whole_context() -> None:
    assert rewrite({"prompt": "a"}, LAUNCHER)["max_tokens"] == UNSAID
    assert rewrite({"prompt": "a", "max_tokens": None}, LAUNCHER)["max_tokens"] == UNSAID
    assert rewrite({"prompt": "a", "max_tokens": 5}, LAUNCHER)["max_tokens"] == 5
    assert "max_tokens" not in rewrite({"prompt": "a"}, VLLM)


def test_a_session_of_sagemaker_s_passes_as_it_is() -> None:
    assert rewrite({"requestType": "NEW_SESSION"}, LAUNCHER) == {"requestType": "NEW_SESSION"}


def test_a_prompt_cut_to_the_longest_is_cut_to_tgi_s() -> None:
    assert rewrite({"prompt": "a", "truncate_prompt_tokens": -1}, LAUNCHER)["truncate_prompt_tokens"] == 1023
    assert rewrite({"prompt": "a", "truncate_prompt_tokens": 5}, LAUNCHER)["truncate_prompt_tokens"] == 5


def test_an_unfinished_message_of_the_assistant_s_is_continued() -> None:
    body = {"messages": [*ASKED, {"role": "assistant", "content": "I"}]}
    result = rewrite(body, LAUNCHER)
    assert (result["add_generation_prompt"], result["continue_final_message"]) == (False, True)
    assert "continue_final_message" not in rewrite({"messages": ASKED}, LAUNCHER)


@pytest.mark.parametrize(
    ("body", "places"),
    [
        ({"messages": ASKED}, 1),
        ({"messages": ASKED, "n": 2}, 2),
        ({"messages": ASKED, "n": None}, 1),
        ({"prompt": "a"}, 1),
        ({"prompt": ["a", "b"]}, 2),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": [], "n": "x"}, 1),
        ({"requestType": "NEW_SESSION"}, 0),
    ],
)
def test_the_places_of_a_body(body: dict[str, Any], places: int) -> None:
    assert num_answers(body) == places


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/invocations"])
@pytest.mark.parametrize(("admission", "expected"), [(Admission(2), [200, 200, 429]), (None, [200, 200, 200])])
def test_a_full_house(path: str, admission: Admission | None, expected: list[int]) -> None:
    """Who finds no place is told at once, in TGI's words; the places come back. `vllm serve` has no such limit."""
    registry = CollectorRegistry()
    recorder = Recorder(1023, 1024, registry)
    rules = Rules(("served",), LIMITS, recorder, as_launcher=admission is not None, admission=admission)
    body = {"messages": ASKED} if path == "/v1/chat/completions" else {"prompt": "a"}

    async def run() -> list[httpx.Response]:
        inside = 0
        answer_now = asyncio.Event()

        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            nonlocal inside
            inside += 1
            await answer_now.wait()
            await Response()(scope, receive, send)

        middleware = OpenAiCompat(route, lambda _: (rules, 1000))

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await middleware({**scope, "app": None}, receive, send)

        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def ask() -> httpx.Response:
                return await client.post(path, json=body)

            first = [asyncio.create_task(ask()) for _ in range(2)]
            while inside < 2 and not any(one.done() for one in first):
                await asyncio.sleep(0)
            last = asyncio.create_task(ask())
            while not last.done() and inside < 3:
                await asyncio.sleep(0)
            answer_now.set()
            return [*await asyncio.gather(*first), await last]

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == expected
    if admission is not None:
        assert answers[-1].json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        assert admission.num_free == 2
        assert registry.get_sample_value("tgi_request_count_total") == 1
        assert registry.get_sample_value("tgi_request_failure_total", {"err": "overloaded"}) == 1
