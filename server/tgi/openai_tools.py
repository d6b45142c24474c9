"""Tools in a chat's body, as TGI's clients send them, for vLLM.

On a server of the launcher a model sees its tools even where its chat template has no place for them, and an answer
calls one function, as in TGI.
"""

from __future__ import annotations

import json
from typing import Any

from .errors import ToolError

Json = dict[str, Any]

_CHOICES = (None, "auto", "none", "required")

_HOW_TO_CALL = (
    "To call one of these functions, answer with nothing but "
    '<tool_call>{"name": the function\'s name, "arguments": an object of its arguments}</tool_call>.'
)
"""In the form that the server reads where the template knows none."""


def rewrite_choice(result: Json) -> None:
    """A function's bare name."""
    choice = result.get("tool_choice")
    if choice in _CHOICES or not isinstance(choice, str):
        return
    if choice not in map(_function_name, result.get("tools") or ()):
        raise ToolError(f"Tool with name {choice} not found")
    result["tool_choice"] = {"type": "function", "function": {"name": choice}}


def _function_name(tool: Any) -> Any:
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None


def are_wanted(asked: Json) -> bool:
    return bool(asked.get("tools")) and asked.get("tool_choice") != "none"


def apply_launcher_rules(result: Json, *, template_shows_them: bool) -> None:
    if result.get("tools") == []:  # TGI's word for none, which vLLM refuses
        result.pop("tools")
        result.pop("tool_choice", None)
    if result.get("tool_choice", "") is None:  # vLLM's word for unsaid is to say nothing
        del result["tool_choice"]
    if not are_wanted(result):
        return
    result.setdefault("parallel_tool_calls", False)
    prompt = result.pop("tool_prompt", None)
    if not template_shows_them:
        _append(f"\n---\n{json.dumps(result['tools'])}\n{prompt or _HOW_TO_CALL}", result)
    elif prompt is not None:
        _append(f"\n---\n{prompt}", result)


def _append(text: str, result: Json) -> None:
    """To the last message, where TGI shows them too."""
    messages = result["messages"]
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict):
        return
    content = last.get("content")
    if isinstance(content, str):
        result["messages"] = [*messages[:-1], {**last, "content": content + text}]
    elif isinstance(content, list):
        result["messages"] = [*messages[:-1], {**last, "content": [*content, {"type": "text", "text": text}]}]
