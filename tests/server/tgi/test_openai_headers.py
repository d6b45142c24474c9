"""TGI's headers on vLLM's answers."""

from __future__ import annotations

import asyncio

import pytest
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message

from neuronserve.server.tgi.openai_headers import Describing

NOTHING = {"type": "http", "method": "POST", "headers": []}


def sent(response: Response) -> tuple[dict[str, str], list[Message]]:
    """(headers, all messages)"""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {}

    asyncio.run(response(NOTHING, receive, Describing(send, "2-chip")))
    assert messages[0]["type"] == "http.response.start"
    return {name.decode(): value.decode() for name, value in messages[0]["headers"]}, messages


def test_of_a_whole_answer() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}
    headers, messages = sent(JSONResponse({"usage": usage}))
    assert headers["x-compute-type"] == "2-chip"
    assert (headers["x-prompt-tokens"], headers["x-generated-tokens"]) == ("5", "7")
    assert float(headers["x-compute-time"]) >= 0
    assert int(headers["x-total-time"]) >= 0
    assert len(messages) == 2


def test_of_a_stream_which_flows_on() -> None:
    async def events() -> object:
        yield b"data: 1\n\n"
        yield b"data: [DONE]\n\n"

    headers, messages = sent(StreamingResponse(events(), media_type="text/event-stream"))
    assert {name: headers[name] for name in ("x-compute-type", "x-accel-buffering", "cache-control")} == {
        "x-compute-type": "2-chip",
        "x-accel-buffering": "no",
        "cache-control": "no-cache",
    }
    assert [message.get("body") for message in messages[1:3]] == [b"data: 1\n\n", b"data: [DONE]\n\n"]


@pytest.mark.parametrize("response", [JSONResponse({"error": 1}, 400), Response(status_code=500)])
def test_refusals_have_none(response: Response) -> None:
    assert not any(name.startswith("x-") for name in sent(response)[0])


@pytest.mark.parametrize("body", [b"", b"[]", b'{"usage": null}'])
def test_an_answer_that_says_no_tokens(body: bytes) -> None:
    headers, _ = sent(Response(body, media_type="application/json"))
    assert headers["x-compute-type"] == "2-chip"
    assert "x-prompt-tokens" not in headers
