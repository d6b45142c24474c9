"""TGI's limits of tokens on vLLM's chat and completion routes, where the launcher started the server.

vLLM renders a request into tokens before it answers anything. Its own limit is lifted there, and what was rendered is
held against `max_input_tokens` and `max_total_tokens`, in TGI's words. Who asks for no number of new tokens gets all
that the total leaves.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.renderers.inputs.preprocess import extract_prompt_len

from .openai_exchange import Render, prompts_of
from .validation import Limits, check_length

if TYPE_CHECKING:
    from starlette.datastructures import State

ANY_LENGTH = 2**62
"""Tokens: a body has a limit of its own."""

UNSAID = ANY_LENGTH
"""As a completion's `max_tokens`; of null, and of nothing, vLLM makes 16."""


def hold(state: State, limits: Limits) -> None:
    """From now on, by the handlers in `state`."""
    chat, completion = state.openai_serving_chat, state.openai_serving_completion
    chat.render_chat_request = within(chat, chat.render_chat_request, limits)
    completion.render_completion_request = within(completion, completion.render_completion_request, limits)


def within(serving: Any, render: Render, limits: Limits) -> Render:
    """`render`, and after it TGI's refusals."""
    lift(serving, limits)

    async def render_within_limits(request: Any) -> Any:
        rendered = await render(request)
        lengths = [extract_prompt_len(serving.model_config, prompt) for prompt in prompts_of(rendered)]
        check(request, lengths, limits)
        return rendered

    return render_within_limits


def lift(serving: Any, limits: Limits) -> None:
    """vLLM's own limit. Configurations are copied, because vLLM's other routes have the originals."""
    serving.online_renderer = copy.copy(serving.online_renderer)
    serving.online_renderer.model_config = _with_length(serving.model_config, ANY_LENGTH)
    serving.model_config = _with_length(serving.model_config, limits.max_total_tokens)


def _with_length(model_config: Any, length: int) -> Any:
    found = copy.copy(model_config)
    found.max_model_len = length
    return found


def check(request: Any, lengths: Iterable[int], limits: Limits) -> None:
    """Of a request of vLLM's, and its prompts' numbers of tokens."""
    given = vars(request)
    asked = given["max_tokens"] if (newer := given.get("max_completion_tokens")) is None else newer
    asked = None if asked == UNSAID else asked
    for length in lengths:
        check_length(length, 1 if asked == 0 else asked, limits)  # of 0 vLLM has its own opinion
    if asked is None:
        request.max_tokens = limits.max_total_tokens  # of which vLLM gives what the prompt leaves
