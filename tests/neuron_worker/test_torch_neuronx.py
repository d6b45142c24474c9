"""Requests through real vLLM on the stand-in for torch_neuronx: transformers' greedy tokens, however scheduled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ..device.models import LONGEST, Reference, make, random_tokens
from .engine import Engine, greedy

FAKES = str(Path(__file__).resolve().parents[1] / "fakes")
NAME = "torch_neuronx"
PROMPTS = [random_tokens(length, length) for length in (2, 21, 40, 1, 33)]


@pytest.fixture(scope="module")
def library() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FAKES)
        patch.setenv("NEURON_RT_NUM_CORES", "1")
        yield import_module(NAME)
    for name in [name for name in sys.modules if name.split(".")[0] == NAME]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(library: ModuleType, model: Reference) -> Engine:
    """Two places and a cache that holds not both to their end: requests wait, and one is preempted."""
    return Engine(
        str(model.directory),
        options={"backend": "torch-neuronx"},
        skip_tokenizer_init=True,
        max_num_seqs=2,
        max_model_len=LONGEST,
        block_size=8,
        num_gpu_blocks_override=15,
        long_prefill_token_threshold=16,
    )


def expected(model: Reference, prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def plain(num_tokens: int, **more: Any) -> Any:
    return greedy(num_tokens, detokenize=False, **more)


def test_each_of_a_batch_as_if_alone(engine: Engine, model: Reference, library: ModuleType) -> None:
    traced = len(library.traces)
    outputs = engine.generate(PROMPTS, plain(30))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [
        expected(model, prompt, 30) for prompt in PROMPTS
    ]
    assert len(library.traces) == traced > 0  # nothing is compiled after the start


def test_a_cached_prefix(engine: Engine, model: Reference) -> None:
    prompt = random_tokens(40, 7)
    first, second = (engine.one(tokens, plain(6)) for tokens in (prompt, [*prompt, 5, 6]))
    assert list(first.outputs[0].token_ids) == expected(model, prompt, 6)
    assert list(second.outputs[0].token_ids) == expected(model, [*prompt, 5, 6], 6)
    assert second.num_cached_tokens == 40


def test_a_seed_gives_the_same_tokens_in_any_company(engine: Engine) -> None:
    params = plain(10, temperature=1.0, seed=5)
    alone = engine.tokens_of([5, 6, 7], params)
    beside = engine.generate([[8, 9], [5, 6, 7]], [plain(12), params])[1]
    assert list(beside.outputs[0].token_ids) == alone


def test_log_probabilities_from_the_host(engine: Engine, model: Reference) -> None:
    output = engine.one([3, 4], plain(4, logprobs=2)).outputs[0]
    assert list(output.token_ids) == expected(model, [3, 4], 4)
    assert output.logprobs is not None
    assert [max(step, key=lambda id: step[id].logprob) for step in output.logprobs] == list(output.token_ids)


def test_a_runtime_that_fails_ends_the_running_requests_and_the_model_is_loaded_again(
    engine: Engine, model: Reference, library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.worker.runner.device
    engine.add("runs", PROMPTS[1], plain(20))
    engine.add("beside", PROMPTS[0], plain(20))
    engine.add("waits", PROMPTS[2], plain(8))
    engine.step(5)

    def fail(traced: object, *arrays: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("NRT_EXEC_HW_ERR")

    monkeypatch.setattr(library.Traced, "__call__", fail)
    engine.finish()

    assert engine.reasons == {"runs": "error", "beside": "error", "waits": "length"}
    assert engine.tokens["waits"] == expected(model, PROMPTS[2], 8)
    assert engine.tokens_of(PROMPTS[1], plain(20)) == expected(model, PROMPTS[1], 20)
    assert engine.worker.runner.device is not before
