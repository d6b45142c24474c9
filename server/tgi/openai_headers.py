"""TGI's headers on vLLM's chat and completion answers, and its count of those that were refused.

A stream gets its headers as it starts and flows on; a whole answer is one message of vLLM's, which says its tokens.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Send

from . import headers
from .metrics import Recorder
from .openai_exchange import Exchange


class Describing:
    """`send` of one request."""

    def __init__(self, send: Send, compute_type: str, exchange: Exchange, *, is_chat: bool) -> None:
        self._send = send
        self._compute_type = compute_type
        self._exchange = exchange
        self._is_chat = is_chat
        self._start: Message | None = None  # held back until the answer is there

    def __call__(self, message: Message) -> Awaitable[None]:
        """What a stream says passes straight on: every token does."""
        if message["type"] == "http.response.body" and self._start is None:
            return self._send(message)
        return self._describe(message)

    async def _describe(self, message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] == 200:
            if _is_stream(message):
                _add(message, headers.of_stream(self._compute_type, self._exchange.characters))
            else:
                self._start = message
                return
        elif self._start is not None:
            start, self._start = self._start, None
            if not message.get("more_body"):
                _add(start, self._of_answer(_usage(message.get("body", b""))))
            await self._send(start)
        await self._send(message)

    def _of_answer(self, usage: dict[str, Any]) -> dict[str, str]:
        exchange = self._exchange
        measured = [(one.timings, one.num_tokens) for one in exchange.asked] if exchange.is_measured else []
        return headers.of_openai_answer(self._compute_type, exchange.characters, measured, usage, is_chat=self._is_chat)


class CountingRefusals:
    """`send` of one request. What is refused never reaches the engine, so nobody else counts it."""

    def __init__(self, send: Send, recorder: Recorder) -> None:
        self._send = send
        self._recorder = recorder

    def __call__(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start" and 400 <= message["status"] < 500:
            self._recorder.request_started()
            self._recorder.request_failure("overloaded" if message["status"] == 429 else "validation")
        return self._send(message)


def _is_stream(start: Message) -> bool:
    return Headers(raw=start["headers"]).get("content-type", "").startswith("text/event-stream")


def _add(start: Message, more: dict[str, str]) -> None:
    start["headers"] = [*start["headers"]]
    MutableHeaders(scope=start).update(more)


def _usage(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body).get("usage")
    except (ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}
