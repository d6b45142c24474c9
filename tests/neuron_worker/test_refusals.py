"""Requests that are refused at the door: the message names key, value and remedy, and vLLM answers with 400."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from neuronserve.neuron_worker.config import NeuronConfig, ServeRequest
from neuronserve.neuron_worker.device.base import Capabilities
from neuronserve.neuron_worker.refusals import check_request, check_sampling
from neuronserve.neuron_worker.resolve import resolve

from .tiny_model import VOCAB_SIZE


@dataclass
class Params:
    """Of vLLM's SamplingParams, what the rules look at."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    seed: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    structured_outputs: object = None
    min_tokens: int = 0
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    temperature: float = 1.0
    top_k: int = 0


def config(model: str, backend: str = "arithmetic", environ: dict[str, str] | None = None) -> NeuronConfig:
    request = ServeRequest(model, max_model_len=128, max_num_seqs=4, options={"backend": backend})
    return resolve(request, environ or {}).config


def prompt(*tokens: int) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": list(tokens)}


def test_every_token_of_the_vocabulary_passes(tiny: str) -> None:
    check_request(prompt(*range(VOCAB_SIZE)), Params(), config(tiny))


@pytest.mark.parametrize("token", [-1, VOCAB_SIZE, 10**9])
def test_a_token_outside_the_vocabulary(tiny: str, token: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token} is out of the vocabulary; send ids from 0 to 63"):
        check_request(prompt(5, token), Params(), config(tiny))


def test_an_empty_prompt_is_left_to_vllm(tiny: str) -> None:
    check_request(prompt(), Params(), config(tiny))


def test_a_device_that_splits_prompts_takes_any_length(tiny: str) -> None:
    check_request(prompt(*[5] * 127), Params(), config(tiny, environ={"NEURON_CONTEXT_LENGTH_BUCKETS": "32"}))


def test_a_device_that_takes_them_whole_refuses_above_its_largest_bucket(tiny: str) -> None:
    slots = config(tiny, "arithmetic-slots", {"NEURON_CONTEXT_LENGTH_BUCKETS": "32,64"})

    check_request(prompt(*[5] * 64), Params(), slots)
    with pytest.raises(ValueError, match=re.escape("65 tokens, the largest context bucket")):
        check_request(prompt(*[5] * 65), Params(), slots)


COMPILED_IN = Capabilities(
    name="chip",
    on_chip=True,
    kv_layout="slots",
    mixes_prefill_and_decode=False,
    splits_prompts=False,
    all_live_rows_in_decode=True,
    prompts_per_prefill=1,
    outputs=("tokens",),
    sampling="fixed",
    max_top_k=256,
    prompt_logprobs=False,
    drafts=False,
    fused_speculation=False,
    tensor_parallel_degrees=(1, 2, 8, 32),
    default_max_num_seqs=4,
    default_max_graphs=8,
    fine_prefill_ladder=False,
)


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"logprobs": 0}, "logprobs"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"seed": 0}, "seed"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"logit_bias": {5: 1.0}}, "logit_bias"),
        ({"structured_outputs": object()}, "structured_outputs"),
    ],
)
def test_what_needs_logits_where_sampling_is_compiled_in(asked: dict[str, Any], name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name}=.* needs logits on the host"):
        check_sampling(Params(**asked), COMPILED_IN)


def test_more_candidates_than_it_keeps() -> None:
    check_sampling(Params(top_k=256), COMPILED_IN)
    with pytest.raises(ValueError, match="top_k=257: the chip device keeps at most 256 candidates; ask for fewer"):
        check_sampling(Params(top_k=257), COMPILED_IN)


def test_a_temperature_where_only_greedy_is_compiled_in() -> None:
    check_sampling(Params(temperature=0), COMPILED_IN, is_greedy=True)
    check_sampling(Params(top_k=1), COMPILED_IN, is_greedy=True)
    with pytest.raises(ValueError, match=r"temperature=0\.5: greedy decoding is compiled into the chip device; send 0"):
        check_sampling(Params(temperature=0.5), COMPILED_IN, is_greedy=True)


def test_what_such_a_device_draws_itself_passes() -> None:
    check_sampling(Params(bad_words=[], logit_bias={}), COMPILED_IN)


def test_scores_of_a_prompt_where_the_device_has_none(tiny: str) -> None:
    """Such a step would fail, and end the requests beside it."""
    with pytest.raises(ValueError, match=r"prompt_logprobs=0 .* the transformers-neuronx device .* leave it out"):
        check_request(prompt(5), Params(prompt_logprobs=0), config(tiny, "transformers-neuronx"))
    check_request(prompt(5), Params(prompt_logprobs=0), config(tiny))
