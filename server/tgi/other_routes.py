"""The routes of vLLM's that TGI never had, on a server of the launcher: none of them generates beyond TGI's limits.

    CHATS       answer as a chat does: a place among `max_concurrent_requests`, the limits of tokens, any model name
    REFUSED     give or take what those limits are not counted in: refused by name
    all others  generate nothing: the limit of a body's size is all they have

`vllm serve` has them as they are. A test walks vLLM's routes, so that a new one is put into one of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.exceptions import VLLMValidationError
from vllm.renderers.inputs.preprocess import extract_prompt_len

from . import body, errors, openai_compat, openai_limits, routes
from .dispatch import replayed
from .errors import TgiError, TransportError, ValidationError
from .openai_compat import Rules
from .openai_exchange import Render
from .openai_headers import CountingRefusals
from .validation import Limits, check_length

if TYPE_CHECKING:
    from starlette.datastructures import State

BATCH, MESSAGES, RESPONSES = "/v1/chat/completions/batch", "/v1/messages", "/v1/responses"
CHATS = (BATCH, MESSAGES, RESPONSES)
REFUSED = ("/cohere/v2/chat", "/generative_scoring", "/inference/v1/generate", "/v1/systemone")
THEIR_OWN = frozenset(path for method, path in routes.OPERATIONS if method == "POST") | {*openai_compat.PATHS}
"""Paths that keep the limits by themselves."""

INSTEAD = "use /generate, /v1/chat/completions or /v1/completions, or start the server with vllm serve"


class OtherRoutes:
    """ASGI middleware in front of all routes."""

    def __init__(self, app: ASGIApp, rules_of: Callable[[Any], tuple[Rules, int]]) -> None:
        self._app = app
        self._rules_of = rules_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            return await self._app(scope, receive, send)
        path = openai_compat.path_of(scope)
        if path in THEIR_OWN:
            return await self._app(scope, receive, send)
        if path in REFUSED:
            return await _refusal(path)(scope, receive, send)
        rules, limit = self._rules_of(scope["app"])
        with ExitStack() as held:
            try:
                raw = await body.read_bytes(Request(scope, receive), limit)
                if path in CHATS:
                    send = send if rules.recorder is None else CountingRefusals(send, rules.recorder)
                    raw = _let_in(path, raw, rules, held)
            except (TgiError, TransportError) as error:
                return await errors.response(error)(scope, receive, send)
            return await self._app(openai_compat.resized(scope, len(raw)), replayed(raw, receive), send)


def _refusal(path: str) -> Response:
    message = f"{path} keeps none of the limits of text-generation-launcher, and is not served by it: {INSTEAD}"
    return JSONResponse({"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}, 400)


def _let_in(path: str, raw: bytes, rules: Rules, held: ExitStack) -> bytes:
    """The body as vLLM gets it; its places are held until the answer has ended."""
    try:
        asked = json.loads(raw)
    except (ValueError, RecursionError):
        return raw  # the route says what is wrong with it
    if not isinstance(asked, dict):
        return raw
    if asked.get("background"):
        raise ValidationError("`background` is not supported: an answer has its place while its client waits for it")
    if not rules.limits.grammar_support:
        openai_compat.check_support(asked)
    if rules.admission is not None:
        held.enter_context(rules.admission.admit(num_answers(path, asked)))
    if asked.get("model") in rules.served:
        return raw
    return json.dumps({**asked, "model": rules.served[0]}).encode()


def num_answers(path: str, asked: Mapping[str, Any]) -> int:
    """One for each conversation of a batch."""
    chats = asked.get("messages")
    return max(1, len(chats)) if path == BATCH and isinstance(chats, list) else 1


def hold(state: State, limits: Limits) -> None:
    """The limits of tokens, from now on, by the handlers in `state`."""
    batch, messages = state.openai_serving_chat_batch, state.anthropic_serving_messages
    batch.render_batch_chat_request = openai_limits.within(batch, batch.render_batch_chat_request, limits)
    messages.render_chat_request = _in_vllm_s_form(openai_limits.within(messages, messages.render_chat_request, limits))
    _hold_responses(state.openai_serving_responses, limits)


def _in_vllm_s_form(render: Render) -> Render:
    """The route's own handler takes every error but vLLM's for a mistake of the server's."""

    async def render_and_translate(request: Any) -> Any:
        try:
            return await render(request)
        except ValidationError as error:
            raise VLLMValidationError(str(error)) from None

    return render_and_translate


def _hold_responses(serving: Any, limits: Limits) -> None:
    openai_limits.lift(serving, limits)
    renderer = serving.online_renderer
    render = renderer.render_responses

    async def render_within_limits(request: Any, **context: Any) -> Any:
        rendered = await render(request, **context)
        if (prompt := getattr(rendered, "engine_input", None)) is not None:  # None: a refusal of vLLM's
            check_length(extract_prompt_len(serving.model_config, prompt), request.max_output_tokens, limits)
        return rendered

    renderer.render_responses = render_within_limits
