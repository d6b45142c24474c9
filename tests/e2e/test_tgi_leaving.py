"""Clients of TGI's routes that leave: their slots come free at once, whatever they were waiting for."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from ..tools.server import PATIENCE, Server
from .conftest import PLACES
from .tgi_client import generate

RUNNING, WAITING, MADE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total"

LONG = 900
DIGITS = {"type": "regex", "value": f"[0-9]{{{LONG}}}"}
"""Ends only when all its tokens are made: this model has a token for each digit."""


def body(number: int) -> dict[str, Any]:
    return {"inputs": f"Number {number}:", "parameters": {"grammar": DIGITS}}


@contextmanager
def open_streams(server: Server, count: int) -> Iterator[list[httpx.Response]]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        requests = [http.build_request("POST", "/generate_stream", json=body(number)) for number in range(count)]
        opened = [http.send(request, stream=True) for request in requests]
        try:
            yield opened
        finally:
            for response in opened:
                response.close()
    server.wait_for_metric(RUNNING, 0)
    server.wait_for_metric(WAITING, 0)


def test_streams_that_are_left(server: Server) -> None:
    """A waiting request starts, and nobody computes the answers that have no reader."""
    before = server.metric(MADE)
    with open_streams(server, PLACES) as opened:
        server.wait_for_metric(RUNNING, PLACES)
        for response in opened:
            next(response.iter_lines())
            response.close()
        assert generate(server, "Hi", max_new_tokens=2)["generated_text"]
    assert server.metric(MADE) - before < PLACES * LONG / 2


def test_one_that_leaves_makes_room_for_the_next(server: Server) -> None:
    with open_streams(server, PLACES + 1) as opened:
        server.wait_for_metric(WAITING, 1)
        opened[2].close()
        server.wait_for_metric(WAITING, 0)
        assert server.metric(RUNNING) == PLACES


@pytest.mark.parametrize("path", ["/generate", "/", "/vertex"])
def test_a_whole_answer_that_nobody_waits_for(server: Server, path: str) -> None:
    before = server.metric(MADE)
    sent = {"instances": [instance(1), instance(2)]} if path == "/vertex" else body(1)
    with raw_request(server, path, sent):
        server.wait_for_metric(RUNNING, 2 if path == "/vertex" else 1)
    server.wait_for_metric(RUNNING, 0)
    assert server.metric(MADE) - before < LONG / 2


def instance(number: int) -> dict[str, Any]:
    """Sampled and without a grammar, so long only as long as the end of text is not drawn."""
    return {"inputs": "word " * 20 * number, "parameters": {"max_new_tokens": LONG}}


def test_both_answers_of_best_of_are_left(server: Server) -> None:
    sent = body(1)
    sent["parameters"] |= {"best_of": 2, "do_sample": True}
    with raw_request(server, "/generate", sent):
        server.wait_for_metric(RUNNING, 2)
    server.wait_for_metric(RUNNING, 0)


@contextmanager
def raw_request(server: Server, path: str, value: Any) -> Iterator[None]:
    """Sent, and its connection closed at the end, answered or not."""
    content = json.dumps(value).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + content)
        yield


def test_a_stop_sequence_frees_its_slot(server: Server) -> None:
    """Found by the routes, so the engine has to be told."""
    answer = generate(server, "Number 1:", grammar=DIGITS, stop=["1", "2", "3", "4"], details=True)
    server.wait_for_metric(RUNNING, 0)
    assert answer["details"]["finish_reason"] in ("stop_sequence", "length")
