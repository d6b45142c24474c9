"""Many clients at once, and clients that leave: same answers, and places that come free."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from ..tools.prompts import Prompt, read_prompts
from ..tools.reference import Reference
from ..tools.server import PATIENCE, Server
from .conftest import MODEL, PLACES

RUNNING, WAITING, MADE = "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:generation_tokens_total"
NUM_STREAMS = 32
NUM_TOKENS = 16


@pytest.fixture(scope="module")
def short_prompts(smollm2: Path) -> list[Prompt]:
    by_length = sorted(read_prompts(smollm2), key=lambda prompt: len(prompt.tokens))
    return by_length[:NUM_STREAMS]


async def stream(client: openai.AsyncOpenAI, prompt: Prompt, **parameters: Any) -> list[int]:
    """Token ids of one streamed completion."""
    defaults = {"model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0, "stream": True}
    body = {"return_token_ids": True, "ignore_eos": True}
    events = await client.completions.create(prompt=prompt.text, extra_body=body, **{**defaults, **parameters})
    tokens = []
    async for event in events:
        if event.choices:
            tokens += event.choices[0].token_ids or []
    return tokens


async def all_at_once(client: openai.AsyncOpenAI, prompts: list[Prompt], **parameters: Any) -> list[list[int]]:
    return await asyncio.gather(*(stream(client, prompt, **parameters) for prompt in prompts))


def client_of(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def test_32_streams_are_each_what_transformers_says(
    server: Server, short_prompts: list[Prompt], reference: Reference
) -> None:
    async def ask() -> list[list[int]]:
        async with client_of(server) as client:
            return await all_at_once(client, short_prompts)

    together = asyncio.run(ask())
    assert [len(tokens) for tokens in together] == [NUM_TOKENS] * NUM_STREAMS
    reference.check(zip([prompt.tokens for prompt in short_prompts], together, strict=True))


def test_a_seeded_answer_is_the_same_alone_and_under_load(server: Server, short_prompts: list[Prompt]) -> None:
    async def ask() -> tuple[list[int], list[list[int]]]:
        async with client_of(server) as client:
            alone = await stream(client, short_prompts[5], temperature=1.0, seed=42)
            others = [short_prompts[20], short_prompts[5], *short_prompts[:10]]
            return alone, await all_at_once(client, others, temperature=1.0, seed=42)

    alone, together = asyncio.run(ask())
    assert alone == together[1]


MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 1},
    {"logprobs": 3},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 2, "top_p": 0.8, "top_k": 40},
    {"structured_outputs": {"regex": r"[A-C]{3}-\d{4}"}, "temperature": 1.0, "seed": 3, "ignore_eos": False},
    {"temperature": 1.0, "seed": 4, "min_p": 0.1, "logit_bias": {"28": 4.0}},
    {"prompt_logprobs": 2, "repetition_penalty": 1.3},
    {"min_tokens": 8, "stop": ["e"], "ignore_eos": False},
    {"n": 2, "temperature": 1.0, "seed": 5},
]


def test_every_kind_of_request_is_answered_as_if_alone(server: Server, short_prompts: list[Prompt]) -> None:
    """Greedy and drawn, on the device and on the host, free and bound by a grammar, in the same steps."""

    async def ask() -> tuple[list[Any], list[Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE) as http:

            async def one(prompt: Prompt, more: dict[str, Any]) -> Any:
                defaults = {"model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
                answer = await http.post("/v1/completions", json={**defaults, "prompt": prompt.text, **more})
                assert answer.status_code == 200, answer.text
                return [said(choice) for choice in answer.json()["choices"]]

            asked = list(zip(short_prompts, MIXED, strict=False))
            alone = [await one(prompt, more) for prompt, more in asked]
            return alone, await asyncio.gather(*(one(prompt, more) for prompt, more in asked))

    alone, together = asyncio.run(ask())
    assert together == alone


def said(choice: dict[str, Any]) -> dict[str, Any]:
    """What must be the same bit for bit: everything."""
    return {key: choice[key] for key in ("text", "finish_reason", "stop_reason", "logprobs", "prompt_logprobs")}


@contextmanager
def all_places_taken(server: Server) -> Iterator[list[httpx.Response]]:
    """Answers long enough to outlast any test, one for each place, all begun."""
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        opened = [open_stream(http, f"Story {n}:") for n in range(PLACES)]
        server.wait_for_metric(RUNNING, PLACES)
        yield opened
        for response in opened:
            response.close()
    server.wait_for_metric(RUNNING, 0)


def open_stream(http: httpx.Client, prompt: str) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 900, "ignore_eos": True, "stream": True}
    return http.send(http.build_request("POST", "/v1/completions", json=body), stream=True)


def test_clients_that_leave_free_their_places(server: Server) -> None:
    """A waiting request starts, and nobody computes the answers that have no reader."""
    before = server.metric(MADE)
    with all_places_taken(server) as opened:
        for response in opened:
            response.close()
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
        assert answer.status_code == 200
    assert server.metric(MADE) - before < PLACES * 900 / 2


def test_one_that_leaves_makes_room_for_the_next(server: Server) -> None:
    """Its neighbours are not disturbed."""
    with all_places_taken(server) as opened:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}
        with ThreadPoolExecutor(1) as other:
            late = other.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
            server.wait_for_metric(WAITING, 1)
            opened[3].close()
            assert late.result().status_code == 200
        server.wait_for_metric(RUNNING, PLACES - 1)


def test_a_client_that_leaves_the_queue_is_forgotten(server: Server) -> None:
    with all_places_taken(server), httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        waiting = open_stream(http, "Last:")
        server.wait_for_metric(WAITING, 1)
        waiting.close()
        server.wait_for_metric(WAITING, 0)
        assert server.metric(RUNNING) == PLACES
