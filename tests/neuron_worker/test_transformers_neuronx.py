"""Requests through real vLLM on the classic library's stand-in: the same tokens however a request is scheduled."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from .conftest import LIBRARY
from .engine import Engine, greedy
from .tiny_model import VOCAB_SIZE, tiny_model

PROMPTS = [[3, 4], [50, 60, 20], list(range(3, 63)), [7] * 40, [9]]

Make = Callable[..., Engine]


@pytest.fixture(scope="module")
def engine(answers: Any, make_engine: Make, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    return start(tmp_path_factory.mktemp("checkpoint"))


def start(directory: Path, options: dict[str, Any] | None = None, **arguments: Any) -> Engine:
    model = tiny_model(directory)
    (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return Engine(
        model, options={"backend": "transformers-neuronx", "sampling": "host", **(options or {})}, **arguments
    )


def test_each_of_a_batch_as_if_alone(engine: Engine, answers: Any) -> None:
    outputs = engine.generate(PROMPTS, greedy(20))
    expected = [answers.greedy(prompt, 20, VOCAB_SIZE) for prompt in PROMPTS]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_more_requests_than_slots(engine: Engine, answers: Any) -> None:
    outputs = engine.generate(PROMPTS * 3, greedy(9))
    expected = [answers.greedy(prompt, 9, VOCAB_SIZE) for prompt in PROMPTS] * 3
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_joined_late_with_a_prompt_of_one_token(engine: Engine, answers: Any, steps: int) -> None:
    engine.add("first", [50, 51, 52], greedy(12))
    engine.step(steps)
    engine.add("late", [9], greedy(8))
    engine.finish()
    assert engine.tokens["first"] == answers.greedy([50, 51, 52], 12, VOCAB_SIZE)
    assert engine.tokens["late"] == answers.greedy([9], 8, VOCAB_SIZE)


def test_an_aborted_request_leaves_its_neighbour_alone(engine: Engine, answers: Any) -> None:
    engine.add("stays", [5, 6, 7], greedy(14))
    engine.add("leaves", [8, 9], greedy(50))
    engine.step(4)
    engine.core.abort_request(["leaves"])
    engine.add("joins", [3, 3], greedy(6))
    engine.finish()
    assert engine.tokens["stays"] == answers.greedy([5, 6, 7], 14, VOCAB_SIZE)
    assert engine.tokens["joins"] == answers.greedy([3, 3], 6, VOCAB_SIZE)


def test_up_to_the_model_s_length(engine: Engine, answers: Any) -> None:
    output = engine.one([7] * 120, greedy(50)).outputs[0]
    assert list(output.token_ids) == answers.greedy([7] * 120, 8, VOCAB_SIZE)
    assert output.finish_reason == "length"


def test_a_seed_gives_the_same_tokens_in_any_company(engine: Engine) -> None:
    params = greedy(10, temperature=1.0, seed=5)
    alone = engine.tokens_of([5, 6, 7], params)
    beside = engine.generate([[8, 9], [5, 6, 7], [3]], [greedy(12), params, greedy(4)])[1]
    assert list(beside.outputs[0].token_ids) == alone


def test_log_probabilities_from_the_host(engine: Engine, answers: Any) -> None:
    output = engine.one([3, 4], greedy(4, logprobs=2)).outputs[0]
    assert list(output.token_ids) == answers.greedy([3, 4], 4, VOCAB_SIZE)
    assert output.logprobs is not None
    assert [max(step, key=lambda id: step[id].logprob) for step in output.logprobs] == list(output.token_ids)


def test_scores_of_a_prompt_are_refused_before_they_end_a_neighbour(engine: Engine, answers: Any) -> None:
    engine.add("stays", [5, 6, 7], greedy(6))
    engine.step(2)
    with pytest.raises(VLLMValidationError, match="prompt_logprobs=1"):
        engine.add("asks", [8, 9], greedy(2, prompt_logprobs=1))
    engine.finish()
    assert engine.tokens["stays"] == answers.greedy([5, 6, 7], 6, VOCAB_SIZE)


def test_a_runtime_that_fails_ends_the_running_requests_and_the_model_is_loaded_again(
    engine: Engine, answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    chip = import_module(f"{LIBRARY}.chip")
    before = engine.worker.runner.device
    for number in range(4):
        engine.add(f"runs {number}", [5 + number, 6], greedy(20))
    engine.add("waits", [8, 9], greedy(8))
    engine.step(8)

    def fail(*args: object) -> None:
        monkeypatch.undo()
        raise RuntimeError("nrt_execute failed: status 5")

    monkeypatch.setattr(chip.Chip, "write_tokens", fail)
    engine.finish()

    assert engine.reasons.pop("waits") == "length"
    assert engine.tokens["waits"] == answers.greedy([8, 9], 8, VOCAB_SIZE)
    assert {name: engine.reasons[f"runs {name}"] for name in range(4)} == dict.fromkeys(range(4), "error")
    assert engine.tokens_of([5, 6], greedy(20)) == answers.greedy([5, 6], 20, VOCAB_SIZE)
    assert engine.worker.runner.device is not before


@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"sampling": "device"}, {}),
        ({"sampling": "auto"}, {"override_neuron_config": {"on_device_generation": {"do_sample": True}}}),
    ],
    ids=["option", "override"],
)
def test_sampling_compiled_into_the_device(
    options: dict[str, Any], arguments: dict[str, Any], answers: Any, tmp_path: Path
) -> None:
    engine = start(tmp_path, options, max_num_seqs=2, **arguments)
    outputs = engine.generate([[3, 4], [5, 6, 7], [9]], [greedy(6), greedy(6, temperature=0.7, top_k=1), greedy(6)])
    expected = [answers.greedy(prompt, 6, VOCAB_SIZE) for prompt in ([3, 4], [5, 6, 7], [9])]
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    with pytest.raises(VLLMValidationError, match="seed=5 needs logits on the host"):
        engine.one([3, 4], greedy(6, temperature=1.0, seed=5))
