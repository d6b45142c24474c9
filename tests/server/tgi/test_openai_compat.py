"""Bodies of TGI's clients, and what vLLM gets of them."""

from __future__ import annotations

from typing import Any

import pytest

from neuronserve.server.tgi.errors import TgiError
from neuronserve.server.tgi.openai_compat import Rules, rewrite
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


@pytest.mark.parametrize(("asked", "served"), [("tgi", "served"), (None, "served"), ("alias", "alias")])
def test_any_model_name_where_the_launcher_started_the_server(asked: str | None, served: str) -> None:
    body = {"messages": ASKED, **({"model": asked} if asked else {})}
    assert rewrite(body, LAUNCHER)["model"] == served
    assert rewrite(body, VLLM) == body


def test_completions_of_the_launcher_s_server_use_the_whole_context() -> None:
    assert rewrite({"prompt": "a"}, LAUNCHER)["max_tokens"] == 1024
    assert rewrite({"prompt": "a", "max_tokens": None}, LAUNCHER)["max_tokens"] == 1024
    assert rewrite({"prompt": "a", "max_tokens": 5}, LAUNCHER)["max_tokens"] == 5
    assert "max_tokens" not in rewrite({"prompt": "a"}, VLLM)


def test_an_unfinished_message_of_the_assistant_s_is_continued() -> None:
    body = {"messages": [*ASKED, {"role": "assistant", "content": "I"}]}
    result = rewrite(body, LAUNCHER)
    assert (result["add_generation_prompt"], result["continue_final_message"]) == (False, True)
    assert "continue_final_message" not in rewrite({"messages": ASKED}, LAUNCHER)
