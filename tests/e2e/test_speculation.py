"""Servers that draft, through OpenAI's client: the same answers, and what /metrics counts. One looks drafts up in the
prompt, one has the head that is shipped, one the model itself beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from neuronserve import speculative

from ..tools.prompts import read_prompts
from ..tools.reference import Reference
from ..tools.server import PATIENCE, VLLM, Server, free_port
from .conftest import FLAGS, MODEL

PROPOSERS = ["lookup", *(pytest.param(name, marks=pytest.mark.full) for name in ("head", "itself"))]

SHIPPED = Path(speculative.__file__).parent / "heads" / "SmolLM2-135M-Instruct"


def flags(drafts: str, model: Path) -> list[str]:
    if drafts == "lookup":
        return ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 4}']
    return ["--speculative-model", str(SHIPPED if drafts == "head" else model), "--num-speculative-tokens", "4"]


@pytest.fixture(scope="module", params=PROPOSERS)
def server(request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    command = [VLLM, "serve", str(smollm2), "--port", str(port), *FLAGS, "--dtype", "float32"]
    command += flags(request.param, smollm2)
    command += ["--neuronserve.adaptive_depth", "false"]  # drafts in every step: no clock decides what a test sees
    server = Server(command, port, tmp_path_factory.mktemp("speculation") / "log")
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)


def test_answers_are_transformers_and_drafts_are_counted(
    client: openai.OpenAI, server: Server, smollm2: Path, reference: Reference, request: pytest.FixtureRequest
) -> None:
    prompts = [prompt.tokens for prompt in read_prompts(smollm2)[:40:8]]
    extra = {"return_token_ids": True, "ignore_eos": True}
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=24, temperature=0, extra_body=extra)
    tokens = [choice.model_extra["token_ids"] for choice in answer.choices]  # type: ignore[index]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 24 * len(prompts)
    reference.check(zip(prompts, tokens, strict=True))
    drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
    accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert 0 < accepted <= drafted
    assert (accepted == drafted) == ("itself" in request.node.name)
    # Every token is an accepted draft or the one that each step gives a row, drafts or none.
    assert server.metric("vllm:spec_decode_num_drafts_total") <= answer.usage.completion_tokens - accepted
    by_position = server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total")
    assert by_position == accepted
    rows = server.metric("neuronserve_decode_rows_total")
    assert answer.usage.completion_tokens == len(prompts) + rows + accepted  # a prompt's own step gives one token


def test_a_stop_string_ends_a_streamed_answer(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "prompt": "one two three four one two three four one two", "temperature": 0}
    whole = client.completions.create(max_tokens=30, **asked).choices[0].text
    stop = whole.split()[6]
    stream = client.completions.create(max_tokens=30, stop=[stop], stream=True, **asked)
    text = "".join(chunk.choices[0].text for chunk in stream)
    assert text == whole[: whole.index(stop)]


def test_what_vllm_refuses_with_drafts_is_a_400(server: Server) -> None:
    body = {"model": MODEL, "prompt": "a", "max_tokens": 2, "temperature": 1, "min_p": 0.1}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 400
    assert "not yet supported with speculative decoding" in answer.text
