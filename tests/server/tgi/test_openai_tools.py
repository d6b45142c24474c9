"""Tools as TGI's clients send them, and what vLLM gets of them where the launcher started the server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from neuronserve.server.tgi.openai_tools import apply_launcher_rules, are_wanted

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
ASKED = [{"role": "user", "content": "Hi"}]


def applied(*, shown: bool = True, **body: Any) -> dict[str, Any]:
    result = {"messages": ASKED, **body}
    apply_launcher_rules(result, template_shows_them=shown)
    return result


def test_a_template_with_a_place_for_tools_shows_them() -> None:
    body = {"messages": ASKED, "tools": TOOLS, "parallel_tool_calls": False}
    assert applied(tools=TOOLS) == body
    assert applied(tools=TOOLS, tool_choice=None) == body


def test_an_answer_calls_one_function_unless_the_client_says_otherwise() -> None:
    assert applied(tools=TOOLS)["parallel_tool_calls"] is False
    assert applied(tools=TOOLS, parallel_tool_calls=True)["parallel_tool_calls"] is True


@pytest.mark.parametrize("body", [{}, {"tools": None}, {"tools": TOOLS, "tool_choice": "none"}])
def test_nobody_sees_tools_that_nobody_may_use(body: dict[str, Any]) -> None:
    assert not are_wanted(body)
    assert applied(shown=False, **body) == {"messages": ASKED, **body}


def test_an_empty_list_is_no_tools() -> None:
    assert applied(tools=[], tool_choice="auto") == {"messages": ASKED}


@pytest.mark.parametrize("tool_prompt", [None, "Choose well."])
def test_another_template_s_last_message_shows_them(tool_prompt: str | None) -> None:
    earlier = {"role": "system", "content": "Be brief."}
    found = applied(shown=False, messages=[earlier, *ASKED], tools=TOOLS, tool_prompt=tool_prompt)
    content = found["messages"][-1]["content"]
    assert found["messages"][0] == earlier
    assert content.startswith(f"Hi\n---\n{json.dumps(TOOLS)}\n")
    assert (tool_prompt or "<tool_call>") in content
    assert "tool_prompt" not in found
    assert ASKED == [{"role": "user", "content": "Hi"}]


def test_a_prompt_for_tools_stands_behind_the_last_message() -> None:
    found = applied(tools=TOOLS, tool_prompt="Choose well.")
    assert found["messages"] == [{"role": "user", "content": "Hi\n---\nChoose well."}]


def test_a_message_in_parts_gets_one_more() -> None:
    parts = [{"type": "text", "text": "Hi"}]
    found = applied(messages=[{"role": "user", "content": parts}], tools=TOOLS, tool_prompt="Choose well.")
    assert found["messages"][0]["content"] == [*parts, {"type": "text", "text": "\n---\nChoose well."}]


@pytest.mark.parametrize("messages", ["not a list", [], [5], [{"role": "assistant", "content": None}]])
def test_what_has_no_text_stays(messages: Any) -> None:
    assert applied(shown=False, messages=messages, tools=TOOLS)["messages"] == messages
