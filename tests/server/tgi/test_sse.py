"""A stream over ASGI with a receive and a send of our own: what arrives, and what is closed when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Message

from neuronserve.server.tgi.sse import COMMENT, EventStream, event


class Connection:
    """A client that reads everything and leaves when told."""

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.leaves = asyncio.Event()

    async def receive(self) -> Message:
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)

    @property
    def body(self) -> bytes:
        return b"".join(message["body"] for message in self.sent[1:])

    async def open(self, stream: EventStream) -> None:
        await stream({"type": "http"}, self.receive, self.send)


def test_an_event() -> None:
    assert event({"a": "é\n", "b": None}) == b'data: {"a":"\xc3\xa9\\n","b":null}\n\n'


def test_headers_and_body() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"1"
        yield b"2"

    async def run() -> Connection:
        connection = Connection()
        await connection.open(EventStream(events(), {"x-a": "b"}))
        return connection

    connection = asyncio.run(run())
    start, *_, end = connection.sent
    assert (start["status"], dict(start["headers"])) == (200, {b"x-a": b"b", b"content-type": b"text/event-stream"})
    assert (connection.body, end["more_body"]) == (b"12", False)


def test_a_client_that_leaves_closes_the_events_which_may_still_await() -> None:
    closed: list[str] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"1"
            await asyncio.Event().wait()  # the engine computes
        finally:
            await asyncio.sleep(0.01)  # the abort, which is sent to the engine
            closed.append("closed")

    async def run() -> None:
        connection = Connection()
        opened = asyncio.create_task(connection.open(EventStream(events(), {})))
        while len(connection.sent) < 2:
            await asyncio.sleep(0)
        connection.leaves.set()
        await opened
        assert closed == ["closed"]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_client_that_leaves_while_its_event_is_being_sent() -> None:
    """The generator waits at its `yield` then, and is closed there."""
    closed: list[str] = []

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            yield b"1"
        finally:
            await asyncio.sleep(0.01)
            closed.append("closed")

    async def run() -> None:
        connection = Connection()

        async def full(message: Message) -> None:
            if message["type"] == "http.response.body":
                connection.leaves.set()
                await asyncio.Event().wait()

        await EventStream(events(), {})({"type": "http"}, connection.receive, full)
        assert closed == ["closed"]

    asyncio.run(run())


def test_silence_is_broken_by_comments() -> None:
    async def run() -> bytes:
        connection = Connection()
        speaks = asyncio.Event()

        async def events() -> AsyncGenerator[bytes, None]:
            await speaks.wait()
            yield b"data"

        opened = asyncio.create_task(connection.open(EventStream(events(), {}, pause=0.01)))
        while connection.body.count(COMMENT) < 2:
            await asyncio.sleep(0)
        speaks.set()
        await opened
        return connection.body

    body = asyncio.run(run())
    assert body.startswith(COMMENT * 2)
    assert body.replace(COMMENT, b"") == b"data"


def test_an_error_reaches_the_server_s_log() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"1"
        raise RuntimeError("lost")

    async def run() -> Any:
        try:
            await Connection().open(EventStream(events(), {}))
        except RuntimeError as error:
            return str(error)

    assert asyncio.run(run()) == "lost"
