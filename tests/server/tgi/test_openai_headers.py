"""TGI's headers on vLLM's answers, and its count of refusals."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message, Send

from neuronserve.server.tgi.generate import Clock
from neuronserve.server.tgi.metrics import Recorder
from neuronserve.server.tgi.openai_exchange import Asked, Exchange
from neuronserve.server.tgi.openai_headers import CountingRefusals, Describing

NOTHING = {"type": "http", "method": "POST", "headers": []}
USAGE = {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12}


def two_prompts() -> Exchange:
    """The first had 0.5 s of validation, 1 s in the queue and 2 s of inference; the second no queue."""
    first = Asked(Clock(started=10, submitted=10.5, queue=1.0, ended=13.5), num_tokens=4, is_done=True)
    second = Asked(Clock(started=10, submitted=10.5, queue=0.0, ended=13.5), num_tokens=3, is_done=True)
    return Exchange(characters=42, asked=[first, second])


TIMES = {
    "x-total-time": "7000",
    "x-validation-time": "1000",
    "x-queue-time": "1000",
    "x-inference-time": "5000",
    "x-time-per-token": "1500",
}


def messages_of(response: Response, **more: object) -> list[Message]:
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        return {}

    sending: Send = Describing(send, "2-chip", **{"exchange": Exchange(), "is_chat": True, **more})  # type: ignore[arg-type]
    asyncio.run(response(NOTHING, receive, sending))
    return messages


def sent(response: Response, **more: object) -> tuple[dict[str, str], list[Message]]:
    """(headers, all messages)"""
    messages = messages_of(response, **more)
    assert messages[0]["type"] == "http.response.start"
    return {name.decode(): value.decode() for name, value in messages[0]["headers"]}, messages


def of_tgi(found: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in found.items() if name.startswith("x-")}


def test_of_a_chat() -> None:
    found, messages = sent(JSONResponse({"usage": USAGE}), exchange=two_prompts())
    assert of_tgi(found) == {
        "x-compute-type": "2-chip",
        "x-compute-time": "7.000000",
        "x-compute-characters": "42",
        **TIMES,
        "x-prompt-tokens": "5",
        "x-generated-tokens": "7",
    }
    assert len(messages) == 2


def test_of_a_completion_which_has_no_compute_time() -> None:
    found, _ = sent(JSONResponse({"usage": USAGE}), exchange=two_prompts(), is_chat=False)
    assert of_tgi(found).keys() == {
        *TIMES,
        "x-compute-type",
        "x-compute-characters",
        "x-prompt-tokens",
        "x-generated-tokens",
    }


def test_of_a_stream_which_flows_on() -> None:
    async def events() -> object:
        yield b"data: 1\n\n"
        yield b"data: [DONE]\n\n"

    found, messages = sent(StreamingResponse(events(), media_type="text/event-stream"), exchange=two_prompts())  # type: ignore[arg-type]
    expected = {"x-compute-type": "2-chip", "x-compute-characters": "42", "x-accel-buffering": "no"}
    assert of_tgi(found) == expected
    assert found["cache-control"] == "no-cache"
    assert [message.get("body") for message in messages[1:3]] == [b"data: 1\n\n", b"data: [DONE]\n\n"]


@pytest.mark.parametrize("response", [JSONResponse({"error": 1}, 400), Response(status_code=500)])
def test_refusals_have_none(response: Response) -> None:
    assert not of_tgi(sent(response)[0])


@pytest.mark.parametrize("body", [b"", b"[]", b'{"usage": null}'])
def test_an_answer_that_says_no_tokens(body: bytes) -> None:
    found, _ = sent(Response(body, media_type="application/json"))
    assert of_tgi(found) == {"x-compute-type": "2-chip"}


@pytest.mark.parametrize(
    ("status", "kind"), [(400, "validation"), (404, "validation"), (422, "validation"), (429, "overloaded")]
)
def test_a_refusal_is_counted_by_its_kind(status: int, kind: str) -> None:
    registry = counted(status)
    assert registry.get_sample_value("tgi_request_count_total") == 1
    assert registry.get_sample_value("tgi_request_failure_total", {"err": kind}) == 1


@pytest.mark.parametrize("status", [200, 500])
def test_what_the_engine_ends_is_counted_elsewhere(status: int) -> None:
    assert counted(status).get_sample_value("tgi_request_count_total") == 0


def counted(status: int) -> CollectorRegistry:
    registry = CollectorRegistry()

    async def run() -> None:
        async def send(_: Message) -> None:
            pass

        sending = CountingRefusals(send, Recorder(8, 16, registry))
        await sending({"type": "http.response.start", "status": status, "headers": []})
        await sending({"type": "http.response.body", "body": b""})

    asyncio.run(run())
    return registry
