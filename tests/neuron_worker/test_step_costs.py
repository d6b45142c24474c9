"""What a step costs besides the device: how often it is called, with which shapes, and what is copied for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from neuronserve.neuron_worker.device.base import DeviceOutput, PackedBatch
from neuronserve.neuron_worker.rounds import HostRow

from .engine import Engine, greedy
from .tiny_model import SMOLLM2_HEADS, tiny_model


class Calls:
    """Every call of the engine's device, and the logits that were handed on."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[PackedBatch] = []
        self.outputs: list[DeviceOutput] = []
        self.sampled: list[list[HostRow]] = []
        runner = engine.worker.runner
        run = runner.device.run

        def noting(batch: PackedBatch) -> DeviceOutput:
            self.batches.append(batch)
            self.outputs.append(run(batch))
            return self.outputs[-1]

        def sample(rows: list[HostRow], *more: Any) -> Any:
            self.sampled.append(list(rows))
            return in_rounds(rows, *more)

        from neuronserve.neuron_worker import runner as module

        in_rounds = module.sample_in_rounds
        monkeypatch.setattr(runner.device, "run", noting)
        monkeypatch.setattr(module, "sample_in_rounds", sample)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        return [(batch.shape.decode_rows, batch.shape.prefill_tokens) for batch in self.batches]


@pytest.fixture(scope="module")
def weighted(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model that has weights, for a device that computes."""
    directory = tmp_path_factory.mktemp("weighted")
    tiny_model(directory, hidden_size=144, **SMOLLM2_HEADS)
    LlamaForCausalLM(LlamaConfig.from_pretrained(directory)).save_pretrained(directory)
    return str(directory)


@pytest.fixture(params=["arithmetic", "cpu"])
def crowd(
    request: pytest.FixtureRequest, weighted: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[Engine, Calls]]:
    """Three requests, one of which is sampled on the host where `logprobs` says so."""

    def start(**more: Any) -> tuple[Engine, Calls]:
        engine = Engine(weighted, options={"backend": request.param}, num_gpu_blocks_override=64)
        calls = Calls(engine, monkeypatch)
        for number, prompt in enumerate(([3, 4], [5, 6, 7], [8])):
            engine.add(f"r{number}", prompt, greedy(8, **(more if number == 0 else {})))
        return engine, calls

    return start


def test_a_step_is_one_call_of_the_smallest_shape_that_holds_it(crowd: Callable[..., tuple[Engine, Calls]]) -> None:
    engine, calls = crowd()
    engine.step(4)
    # Six prompt tokens in a bucket of 16, then three rows where there are shapes of 1, 2 and 4.
    assert calls.shapes == [(0, 16), (4, 0), (4, 0), (4, 0)]
    assert {batch.shape for batch in calls.batches} <= set(engine.worker.config.plan.shapes)


def test_the_shape_follows_the_rows_that_are_left(crowd: Callable[..., tuple[Engine, Calls]]) -> None:
    engine, calls = crowd()
    engine.step(2)
    engine.core.abort_request(["r0"])
    engine.core.abort_request(["r1"])
    engine.step(2)
    assert calls.shapes[2:] == [(1, 0), (1, 0)]


def test_a_steady_step_writes_into_the_arrays_of_the_step_before(crowd: Callable[..., tuple[Engine, Calls]]) -> None:
    engine, calls = crowd()
    engine.step(5)
    first, *others = calls.batches[1:]
    assert len(others) == 3
    for other in others:
        assert other is first


def test_a_prompt_beside_decodes_is_the_same_call(crowd: Callable[..., tuple[Engine, Calls]]) -> None:
    engine, calls = crowd()
    engine.step(2)
    engine.add("late", [9, 8, 7, 6, 5], greedy(8))
    engine.step(1)
    assert calls.shapes[2:] == [(4, 16)]


def test_the_sampler_is_given_views_of_the_devices_logits(crowd: Callable[..., tuple[Engine, Calls]]) -> None:
    engine, calls = crowd(logprobs=1)
    engine.step(4)
    assert [len(rows) for rows in calls.sampled] == [1, 1, 1, 1]
    for output, (row,) in zip(calls.outputs, calls.sampled, strict=True):
        assert output.logits is not None
        assert np.shares_memory(row.logits, output.logits)


def test_logits_are_copied_once_for_rows_sampled_on_the_host(
    crowd: Callable[..., tuple[Engine, Calls]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's sampler writes into what it is given, and the device's own arrays are left as they are."""
    engine, calls = crowd(logprobs=1)
    engine.step(1)
    stacked: list[int] = []
    stack = np.stack

    def noting(rows: list[Any]) -> Any:
        stacked.append(sum(row.nbytes for row in rows))
        return stack(rows)

    monkeypatch.setattr("neuronserve.neuron_worker.sampling.np.stack", noting)
    engine.step(3)
    (row,) = calls.sampled[-1]
    assert stacked == [row.logits.nbytes] * 3
    assert row.logits.shape == (1, 64), "one row of the whole vocabulary"


def test_rows_sampled_on_the_device_bring_no_logits_over(crowd: Callable[..., tuple[Engine, Calls]]) -> None:
    engine, calls = crowd()
    engine.step(4)
    assert [output.logits for output in calls.outputs] == [None] * 4
    assert calls.sampled == []
