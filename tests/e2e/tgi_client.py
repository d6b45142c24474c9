"""Exchanges with TGI's routes, byte by byte where it matters."""

from __future__ import annotations

import json
from typing import Any

import httpx

from ..tools.server import PATIENCE, Server

PROMPT = "The old harbour was quiet"


def post(server: Server, path: str, body: Any = None, **arguments: Any) -> httpx.Response:
    """`body` as JSON, or what `arguments` says instead."""
    sent = arguments if body is None else {"json": body, **arguments}
    return httpx.post(f"{server.url}{path}", timeout=PATIENCE, **sent)


def generate(server: Server, inputs: str = PROMPT, **parameters: Any) -> dict[str, Any]:
    response = post(server, "/generate", {"inputs": inputs, "parameters": parameters})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """Of a whole stream, which must hold nothing else."""
    *pieces, rest = response.text.split("\n\n")
    assert rest == ""
    assert all(piece.startswith("data: ") and "\n" not in piece for piece in pieces), pieces
    return [json.loads(piece.removeprefix("data: ")) for piece in pieces]


def stream(server: Server, inputs: str = PROMPT, **parameters: Any) -> list[dict[str, Any]]:
    return events(post(server, "/generate_stream", {"inputs": inputs, "parameters": parameters}))
