"""Paths that vLLM and TGI both have, with bodies of different shapes: whose request it is, is read from the body.

    path            with `inputs`        otherwise
    /tokenize       TGI's: a list        with `prompt` or `messages` vLLM's: an object
    /invocations    TGI's: as POST /     with `messages`, `prompt` or a session's `requestType` vLLM's

A body with none of these is nobody's; the refusal is TGI's. `/health` and `/ping` mean the same to both kinds of
client, and a healthy answer looks the same; POST /ping stays vLLM's. The table in docs/tgi-routes.md says it to users.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

THEIRS: Mapping[str, tuple[str, ...]] = {
    "/tokenize": ("prompt", "messages"),
    "/invocations": ("messages", "prompt", "requestType"),
}
"""Path -> keys that make a request vLLM's."""


def is_theirs(path: str, value: Any) -> bool:
    return isinstance(value, dict) and "inputs" not in value and any(key in value for key in THEIRS[path])


def their_routes(app: FastAPI) -> dict[str, APIRoute]:
    """vLLM's own, before ours take their place."""
    return {
        route.path: route
        for route in app.routes
        if isinstance(route, APIRoute) and route.path in THEIRS and "POST" in route.methods
    }


class Handed(Response):
    """The answer of another route to the same request; its body has been read and is read to it again."""

    def __init__(self, route: APIRoute, body: bytes) -> None:
        super().__init__()
        self._route = route
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._route.handle(scope, replayed(self._body, receive), send)


def replayed(body: bytes, receive: Receive) -> Receive:
    """The body once, then what really comes: the client's leaving."""
    left: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return left.pop() if left else await receive()

    return receive_again
