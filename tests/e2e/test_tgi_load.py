"""A crowd at the TGI routes, half of which leaves: the server stays well, and nothing of them stays in it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from ..tools.server import PATIENCE, Server

CLIENTS, PERMITS = 200, 128
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
CACHE_IN_USE = "vllm:kv_cache_usage_perc"
SEED = 20
WORDS = Path(__file__).read_text().split()


def bodies(chance: random.Random, tokens: int) -> tuple[str, dict[str, Any]]:
    """A route of either kind, and what is asked of it."""
    parameters: dict[str, Any] = {"max_new_tokens": tokens, "details": chance.random() < 0.5}
    if chance.random() < 0.5:
        parameters |= {"do_sample": True, "seed": chance.randrange(1000), "top_p": 0.9}
    inputs = " ".join(chance.choices(WORDS, k=chance.randrange(1, 40)))
    route, stream = chance.choice([("/generate", None), ("/generate_stream", None), ("/", True), ("/", False)])
    body = {"inputs": inputs, "parameters": parameters}
    return route, body if stream is None else {**body, "stream": stream}


async def leaves(http: httpx.AsyncClient, route: str, body: dict[str, Any], after: int) -> str:
    """Reads `after` lines, then hangs up; a route that does not stream is left while it computes."""
    try:
        async with asyncio.timeout(0.2 + after / 4), http.stream("POST", route, json=body) as answer:
            if answer.status_code == 429:
                return "overloaded"
            lines = answer.aiter_lines()
            for _ in range(after):
                await anext(lines)
    except (TimeoutError, StopAsyncIteration):
        pass
    return "left"


async def stays(http: httpx.AsyncClient, route: str, body: dict[str, Any]) -> str:
    answer = await http.post(route, json=body)
    if answer.status_code == 429:
        assert answer.json() == {"error": "Model is overloaded", "error_type": "overloaded"}
        return "overloaded"
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return "answered"
    events = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data:")]
    if events[-1].get("error_type") == "overloaded":
        return "overloaded"
    assert events[-1]["generated_text"] is not None
    assert [event["index"] for event in events] == list(range(1, len(events) + 1))
    return "answered"


async def watch_health(http: httpx.AsyncClient, statuses: list[int]) -> None:
    while True:
        statuses.append((await http.get("/health")).status_code)
        await asyncio.sleep(0.1)


async def crowd(tgi_server: Server) -> tuple[Counter[str], list[int]]:
    chance = random.Random(SEED)
    statuses: list[int] = []
    limits = httpx.Limits(max_connections=CLIENTS + 1)
    async with (
        httpx.AsyncClient(base_url=tgi_server.url, timeout=PATIENCE, limits=limits) as http,
        httpx.AsyncClient(base_url=tgi_server.url, timeout=PATIENCE) as other,
    ):
        watching = asyncio.create_task(watch_health(other, statuses))
        clients = []
        for _ in range(CLIENTS):
            route, body = bodies(chance, tokens=chance.randrange(1, 24))
            is_gone = chance.random() < 0.5
            clients.append(leaves(http, route, body, chance.randrange(8)) if is_gone else stays(http, route, body))
        kinds = Counter(await asyncio.gather(*clients))
        watching.cancel()
    return kinds, statuses


async def all_permits(tgi_server: Server) -> list[int]:
    """One short request for each permit, all at once."""
    limits = httpx.Limits(max_connections=PERMITS)
    async with httpx.AsyncClient(base_url=tgi_server.url, timeout=PATIENCE, limits=limits) as http:
        body = {"inputs": "Hi", "parameters": {"max_new_tokens": 1}}
        answers = await asyncio.gather(*(http.post("/generate", json=body) for _ in range(PERMITS)))
    return [answer.status_code for answer in answers]


def open_files(tgi_server: Server) -> int:
    """Connections among them."""
    return len(list(Path(f"/proc/{tgi_server.process.pid}/fd").iterdir()))


def test_a_crowd_that_half_leaves(tgi_server: Server) -> None:
    before = open_files(tgi_server)

    kinds, statuses = asyncio.run(crowd(tgi_server))

    assert kinds["answered"] > 0, kinds
    assert kinds["left"] > CLIENTS / 4, kinds
    assert set(statuses) == {200}
    tgi_server.wait_for_metric(RUNNING, 0)
    tgi_server.wait_for_metric(WAITING, 0)
    tgi_server.wait_for_metric(CACHE_IN_USE, 0)
    assert asyncio.run(all_permits(tgi_server)) == [200] * PERMITS
    deadline = time.monotonic() + PATIENCE
    while open_files(tgi_server) > before + 2:  # it hears of closed connections one by one
        assert time.monotonic() < deadline, "connections stay open"
        time.sleep(0.1)
