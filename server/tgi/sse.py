"""A stream of events over ASGI: what is sent, the comment that keeps an idle connection, and the client that leaves.

Starlette's own streaming response cancels its generator inside a scope that cancels every further await, the abort of
the engine's request among them; here the generator is cancelled once and then closed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

COMMENT = b":\n\n"
PAUSE = 15.0
"""Seconds without an event until a comment is sent."""


def event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n\n"


class EventStream(Response):
    """The events are closed when all are sent, when the client leaves, and when the server stops."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes, None], headers: Mapping[str, str], *, pause: float = PAUSE
    ) -> None:
        super().__init__(headers={**headers, "content-type": self.media_type})
        del self.headers["content-length"]
        self._events = events
        self._pause = pause

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.create_task(self._send(send))
        leaving = asyncio.create_task(client_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await ended(leaving)
            await ended(sending)
        if not sending.cancelled():
            sending.result()

    async def _send(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            idle = _Idle(send, self._pause)
            try:
                async for sent in events:
                    idle.restart()
                    await send({"type": "http.response.body", "body": sent, "more_body": True})
            finally:
                idle.stop()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Idle:
    """Sends a comment whenever nothing was sent for a while."""

    def __init__(self, send: Send, pause: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._task = asyncio.create_task(self._watch(send, pause))

    def restart(self) -> None:
        self._last = self._loop.time()

    def stop(self) -> None:
        self._task.cancel()

    async def _watch(self, send: Send, pause: float) -> None:
        while True:
            if (left := self._last + pause - self._loop.time()) > 0:
                await asyncio.sleep(left)
                continue
            await send({"type": "http.response.body", "body": COMMENT, "more_body": True})
            self.restart()


async def client_left(receive: Receive) -> None:
    """Returns when it has. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def ended(task: asyncio.Task[Any]) -> None:
    """Cancelled once, and waited for: what it has to close it can still close."""
    task.cancel()
    await asyncio.wait({task})
