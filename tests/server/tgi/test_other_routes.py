"""vLLM's routes that TGI never had, on a server of the launcher: its real app is walked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input

from neuronserve.server import refused_routes
from neuronserve.server.tgi import routes
from neuronserve.server.tgi.admission import Admission
from neuronserve.server.tgi.errors import ValidationError
from neuronserve.server.tgi.openai_compat import Rules
from neuronserve.server.tgi.other_routes import (
    BATCH,
    CHATS,
    MESSAGES,
    REFUSED,
    RESPONSES,
    THEIR_OWN,
    OtherRoutes,
    hold,
    num_answers,
)
from neuronserve.server.tgi.validation import Limits

from .app import build

LIMITS = Limits(2, 4, 5, max_input_tokens=8, max_total_tokens=18)
LAUNCHED = '{"neuronserve": {"tgi": {"any_model_name": true, "payload_limit": 100}}}'

GENERATES_NOTHING = {
    "/detokenize",
    "/inference/v1/abort_requests",
    "/is_scaling_elastic_ep",
    "/ping",
    "/scale_elastic_ep",
    "/v1/chat/completions/derender",
    "/v1/chat/completions/render",
    "/v1/completions/derender",
    "/v1/completions/render",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/responses/render",
    "/v1/responses/{response_id}/cancel",
}
"""As their documentation in vLLM says. Whoever adds one looks whether it asks the engine for tokens."""


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return build("--additional-config", LAUNCHED)


def posted(app: FastAPI) -> Iterator[str]:
    """Paths; those that this server refuses anyway are left out."""
    refusals = (refused_routes.__name__, ""), (routes.__name__, routes.not_allowed.__name__)
    for route in app.routes:
        if "POST" in (getattr(route, "methods", None) or ()):
            assert isinstance(route, Route)
            made_by = route.endpoint.__module__, route.endpoint.__qualname__
            if not any(made_by[0] == module and made_by[1].startswith(name) for module, name in refusals):
                yield route.path


def test_no_route_of_vllm_s_generates_beyond_the_limits(app: FastAPI) -> None:
    limited, nothing = THEIR_OWN | {*CHATS}, GENERATES_NOTHING | {*REFUSED}
    assert not limited & nothing
    assert set(posted(app)) - limited - nothing == set()
    assert {*CHATS} <= set(posted(app))


@pytest.mark.parametrize("path", REFUSED)
def test_refused_by_name(app: FastAPI, path: str) -> None:
    refused = TestClient(app).post(path, json={})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"{path} keeps none of the limits")


def test_vllm_serve_has_them_all() -> None:
    plain = build()
    assert all(OtherRoutes is not entry.cls for entry in plain.user_middleware)


async def _echo(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    await JSONResponse(json.loads(message["body"] or b"null"))(scope, receive, send)


def asked(path: str, *bodies: Any, rules: Rules | None = None) -> list[httpx.Response]:
    """Each while those before it are held inside the route."""
    rules = rules or Rules(("ours",), LIMITS, as_launcher=True, admission=Admission(2))
    answer_now, num_inside = asyncio.Event(), 0

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal num_inside
        num_inside += 1
        await answer_now.wait()
        await _echo(scope, receive, send)

    middleware = OtherRoutes(route, lambda _: (rules, 100))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await middleware({**scope, "app": None}, receive, send)

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            sent: list[asyncio.Task[httpx.Response]] = []
            for body in bodies:
                before = num_inside
                sent.append(asyncio.create_task(client.post(path, json=body)))
                while num_inside == before and not sent[-1].done():
                    await asyncio.sleep(0)
            answer_now.set()
            return list(await asyncio.gather(*sent))

    return asyncio.run(run())


@pytest.mark.parametrize("path", CHATS)
def test_a_full_house(path: str) -> None:
    rules = Rules(("ours",), LIMITS, as_launcher=True, admission=Admission(2))
    answers = asked(path, {}, {}, {}, rules=rules)
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[2].json() == {"error": "Model is overloaded", "error_type": "overloaded"}
    assert rules.admission is not None
    assert rules.admission.num_free == 2


def test_each_conversation_of_a_batch_has_a_place() -> None:
    assert [answer.status_code for answer in asked(BATCH, {"messages": [[], []]}, {})] == [200, 429]
    assert num_answers(BATCH, {"messages": [[], [], []]}) == 3
    assert num_answers(MESSAGES, {"messages": [{}, {}, {}]}) == 1


@pytest.mark.parametrize("path", CHATS)
@pytest.mark.parametrize(("model", "served"), [({}, "ours"), ({"model": "tgi"}, "ours"), ({"model": "ours"}, "ours")])
def test_any_model_name(path: str, model: dict[str, str], served: str) -> None:
    (answer,) = asked(path, {"max_tokens": 3, **model})
    assert answer.json() == {"max_tokens": 3, "model": served}


@pytest.mark.parametrize("path", sorted({*CHATS, *GENERATES_NOTHING}))
def test_a_body_that_is_too_large(path: str) -> None:
    (answer,) = asked(path, {"messages": "a" * 100})
    assert (answer.status_code, answer.text) == (413, "Failed to buffer the request body: length limit exceeded")


def test_an_answer_in_the_background_would_hold_no_place() -> None:
    (answer,) = asked(RESPONSES, {"input": "a", "background": True})
    assert (answer.status_code, answer.json()["error_type"]) == (422, "validation")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}),
        (MESSAGES, {"tools": [{"name": "f"}]}),
        (BATCH, {"response_format": {"type": "json_object"}}),
    ],
)
def test_without_grammars(path: str, body: dict[str, Any]) -> None:
    rules = Rules(("ours",), Limits(2, 4, 5, 8, 18, grammar_support=False), as_launcher=True)
    (answer,) = asked(path, body, rules=rules)
    assert (answer.status_code, answer.json()["error"]) == (422, "Input validation error: grammar is not supported")


class Handlers:
    """vLLM's handlers of the three, that render a prompt of so many tokens, with our limits on them."""

    def __init__(self, num_tokens: int) -> None:
        prompt = tokens_input([1] * num_tokens)

        async def chat(_: Any) -> Any:
            return [], [prompt]

        async def batch(_: Any) -> Any:
            return [], [[]], [prompt]

        async def responses(_: Any) -> Any:
            return SimpleNamespace(messages=[], engine_input=prompt)

        self.config = SimpleNamespace(max_model_len=32, is_encoder_decoder=False)
        self.batch, self.messages, self.responses = (self._handler() for _ in range(3))
        self.batch.render_batch_chat_request = batch
        self.messages.render_chat_request = chat
        self.responses.online_renderer.render_responses = responses
        state: Any = SimpleNamespace(
            openai_serving_chat_batch=self.batch,
            anthropic_serving_messages=self.messages,
            openai_serving_responses=self.responses,
        )
        hold(state, LIMITS)

    def _handler(self) -> SimpleNamespace:
        return SimpleNamespace(model_config=self.config, online_renderer=SimpleNamespace(model_config=self.config))

    def ask(self, max_tokens: int | None) -> Iterator[Any]:
        for render in (self.batch.render_batch_chat_request, self.messages.render_chat_request):
            yield render(SimpleNamespace(max_tokens=max_tokens, max_completion_tokens=None))
        yield self.responses.online_renderer.render_responses(SimpleNamespace(max_output_tokens=max_tokens))


@pytest.mark.parametrize("max_tokens", [None, 10])
def test_what_fits_passes(max_tokens: int | None) -> None:
    for asking in Handlers(8).ask(max_tokens):
        assert asyncio.run(asking)


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "message"),
    [
        (9, None, "`inputs` must have less than 8 tokens. Given: 9"),
        (8, 11, "must be <= 18. Given: 8 `inputs` tokens and 11 `max_new_tokens`"),
    ],
)
def test_refused_in_tgi_s_words(num_tokens: int, max_tokens: int | None, message: str) -> None:
    kinds = (ValidationError, VLLMValidationError, ValidationError)
    for asking, kind in zip(Handlers(num_tokens).ask(max_tokens), kinds, strict=True):
        with pytest.raises(kind) as refused:
            asyncio.run(asking)
        assert message in str(refused.value)
