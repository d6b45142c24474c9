"""vLLM over a device in another process: the same tokens, and a kill costs the running requests alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from neuronserve.neuron_worker.device.remote import RemoteDevice

from .engine import Engine, expected, greedy

PROMPT = [(7 * i) % 60 + 3 for i in range(40)]


@pytest.fixture(params=["arithmetic", "arithmetic-slots"])
def engine(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Iterator[Engine]:
    engine = make_engine(options={"backend": request.param, "device_python": sys.executable}, max_num_seqs=2)
    yield engine
    pid = device_of(engine).pid
    engine.worker.shutdown()
    assert not Path(f"/proc/{pid}").exists()


def device_of(engine: Engine) -> RemoteDevice:
    device = engine.worker.runner.device
    assert isinstance(device, RemoteDevice)
    return device


def kill_device(engine: Engine) -> None:
    os.kill(device_of(engine).pid, signal.SIGKILL)


def test_tokens_are_those_of_the_device_in_this_process(engine: Engine) -> None:
    prompts = [PROMPT, [3, 4], [50, 60, 20, 31]]
    outputs = engine.generate(prompts, greedy(12))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(prompt, 12) for prompt in prompts]
    assert device_of(engine).capabilities.name.startswith("arithmetic")


def test_logits_cross_too(engine: Engine) -> None:
    output = engine.one(PROMPT, greedy(4, logprobs=2, prompt_logprobs=1 if engine_has_scores(engine) else None))
    assert list(output.outputs[0].token_ids) == expected(PROMPT, 4)
    assert engine.worker.neuronserve_metrics()["rows_sampled_on_host"] == 4


def engine_has_scores(engine: Engine) -> bool:
    return device_of(engine).capabilities.prompt_logprobs


@pytest.mark.parametrize("steps", [0, 4], ids=["in prefill", "in decode"])
def test_a_kill_ends_the_running_requests_and_the_next_are_served(engine: Engine, steps: int) -> None:
    engine.add("a", PROMPT, greedy(20))
    engine.add("b", [3, 4], greedy(20))
    engine.add("waits", [5, 6], greedy(8))
    engine.step(steps)
    killed = device_of(engine).pid
    kill_device(engine)
    engine.finish()

    assert engine.reasons["a"] == "error"
    assert engine.reasons["waits"] == "length"
    assert engine.tokens["waits"] == expected([5, 6], 8)
    again = engine.one(PROMPT, greedy(20))
    assert list(again.outputs[0].token_ids) == expected(PROMPT, 20)
    assert device_of(engine).pid != killed
