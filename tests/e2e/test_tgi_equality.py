"""TGI's answers are the OpenAI route's for the same prompt, parameters and seed."""

from __future__ import annotations

import re
from typing import Any

import openai
import pytest

from ..tools.server import Server
from .conftest import MODEL
from .tgi_client import PROMPT, generate, stream

PROMPTS = (PROMPT, "def add(a, b):", "Ein Fluss ist", "次の文", "1, 2, 3,")

VLLM_S_OWN = (
    "top_k",
    "repetition_penalty",
    "include_stop_str_in_output",
    "truncate_prompt_tokens",
    "structured_outputs",
)
"""Parameters that OpenAI's client does not know."""


def completed(client: openai.OpenAI, prompt: str, **parameters: Any) -> Any:
    extra = {name: parameters.pop(name) for name in VLLM_S_OWN if name in parameters}
    defaults = {"model": MODEL, "max_tokens": 20, "temperature": 0}
    (choice,) = client.completions.create(
        prompt=prompt, extra_body={"return_token_ids": True, **extra}, **{**defaults, **parameters}
    ).choices
    return choice


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy(server: Server, client: openai.OpenAI, prompt: str) -> None:
    theirs = completed(client, prompt, logprobs=0)
    ours = generate(server, prompt, max_new_tokens=20, details=True)
    tokens = ours["details"]["tokens"]
    assert ours["generated_text"] == theirs.text
    assert [token["id"] for token in tokens] == theirs.token_ids
    assert [token["logprob"] for token in tokens] == theirs.logprobs.token_logprobs


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("seed", [0, 42])
@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 0.8},
        {"temperature": 1.5, "top_k": 20},
        {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
    ],
)
def test_seeded_sampling(
    server: Server, client: openai.OpenAI, prompt: str, seed: int, parameters: dict[str, Any]
) -> None:
    theirs = completed(client, prompt, seed=seed, **parameters)
    assert generate(server, prompt, max_new_tokens=20, seed=seed, **parameters)["generated_text"] == theirs.text


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}])
@pytest.mark.parametrize("prompt", PROMPTS)
def test_stop(server: Server, client: openai.OpenAI, prompt: str, sampling: dict[str, Any]) -> None:
    """Where a stop ends with a token, as TGI has it alone: vLLM's may end within one."""
    whole = generate(server, prompt, max_new_tokens=20, details=True, **sampling)["details"]["tokens"]
    num_tokens = next(number for number in range(8, 20) if whole[number - 1]["text"])
    stop = "".join(token["text"] for token in whole[:num_tokens])[-4:]
    extra = {"include_stop_str_in_output": True}
    theirs = completed(client, prompt, stop=[stop], **sampling, **extra)
    ours = generate(server, prompt, max_new_tokens=20, stop=[stop], details=True, **sampling)
    assert ours["generated_text"] == theirs.text
    assert ours["generated_text"].endswith(stop)
    assert [token["id"] for token in ours["details"]["tokens"]] == theirs.token_ids
    assert ours["details"]["finish_reason"] == "stop_sequence"
    assert theirs.stop_reason == stop


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}])
@pytest.mark.parametrize("left", [1, 2, 3])
def test_truncate(server: Server, client: openai.OpenAI, left: int, sampling: dict[str, Any]) -> None:
    whole = completed(client, PROMPT, **sampling)
    theirs = completed(client, PROMPT, truncate_prompt_tokens=left, **sampling)
    ours = generate(server, PROMPT, max_new_tokens=20, truncate=left, details=True, **sampling)
    assert [token["id"] for token in ours["details"]["tokens"]] == theirs.token_ids
    assert theirs.text != whole.text


PLATE = "[a-f]{3}-[0-9]{4}"
SCHEMA = {
    "type": "object",
    "properties": {"quiet": {"type": "boolean"}, "boats": {"enum": [0, 1, 2]}},
    "required": ["quiet", "boats"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "seed": 5}])
@pytest.mark.parametrize(
    ("grammar", "structured", "whole"),
    [
        ({"type": "regex", "value": PLATE}, {"regex": PLATE}, PLATE),
        ({"type": "json", "value": SCHEMA}, {"json": SCHEMA}, r"\{[\s\S]*"),  # greedy, it may be blanks to the end
    ],
)
def test_grammar(
    server: Server,
    client: openai.OpenAI,
    grammar: dict[str, Any],
    structured: dict[str, Any],
    whole: str,
    sampling: dict[str, Any],
) -> None:
    theirs = completed(client, PROMPT, structured_outputs=structured, max_tokens=40, **sampling)
    ours = generate(server, PROMPT, max_new_tokens=40, grammar=grammar, **sampling)["generated_text"]
    assert ours == theirs.text
    assert re.fullmatch(whole, ours)


def test_do_sample_alone_is_temperature_one(server: Server, client: openai.OpenAI) -> None:
    theirs = completed(client, PROMPT, seed=7, temperature=1.0, top_p=1.0, top_k=0)
    assert generate(server, max_new_tokens=20, seed=7, do_sample=True)["generated_text"] == theirs.text


def test_a_repetition_penalty_on_greedy_decoding(server: Server, client: openai.OpenAI) -> None:
    theirs = completed(client, PROMPT, repetition_penalty=1.3)
    assert generate(server, max_new_tokens=20, repetition_penalty=1.3)["generated_text"] == theirs.text


def test_a_stream_says_what_a_whole_answer_says(server: Server) -> None:
    parameters = {"max_new_tokens": 20, "temperature": 0.8, "seed": 3}
    found = stream(server, details=True, **parameters)
    whole = generate(server, details=True, **parameters)
    assert [event["token"] for event in found] == whole["details"]["tokens"]
    assert found[-1]["generated_text"] == whole["generated_text"]
    assert found[-1]["details"]["seed"] == 3


def test_log_probabilities_are_of_the_processed_scores(server: Server) -> None:
    """With one candidate left its share is all."""
    tokens = generate(server, max_new_tokens=4, top_k=1, details=True)["details"]["tokens"]
    assert [token["logprob"] for token in tokens] == [0.0] * 4
