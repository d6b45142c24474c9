"""vLLM over a device in another process: the same tokens, and a kill costs the running requests alone."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker.device.remote import RemoteDevice
from neuronserve.neuron_worker.revival import EngineGivesUp

from .engine import Engine, expected, fail_loads, greedy, note_pauses
from .proposers import InStep, drafter_of

PROMPT = [(7 * i) % 60 + 3 for i in range(40)]


@pytest.fixture(params=["arithmetic", "arithmetic-slots"])
def engine(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Iterator[Engine]:
    engine = make_engine(options={"backend": request.param, "device_python": sys.executable}, max_num_seqs=2)
    engine.worker.idle_watch.stop()  # a test that wants it looks itself
    yield engine
    pid = device_of(engine).pid
    engine.worker.shutdown()
    assert not Path(f"/proc/{pid}").exists()


def device_of(engine: Engine) -> RemoteDevice:
    device = engine.worker.runner.device
    assert isinstance(device, RemoteDevice)
    return device


def kill_device(engine: Engine) -> None:
    device = device_of(engine)
    os.kill(device.pid, signal.SIGKILL)
    device._process.end(patience=60)  # it is gone when this returns, and nobody has been told


def test_tokens_are_those_of_the_device_in_this_process(engine: Engine) -> None:
    prompts = [PROMPT, [3, 4], [50, 60, 20, 31]]
    outputs = engine.generate(prompts, greedy(12))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(prompt, 12) for prompt in prompts]
    assert device_of(engine).capabilities.name.startswith("arithmetic")


def test_a_draft_in_the_other_process_is_in_step(
    make_engine: Callable[..., Engine], asked: Callable[[str], dict[str, Any]]
) -> None:
    engine = make_engine(options={"device_python": sys.executable}, max_num_seqs=2, **asked("eagle"))
    engine.worker.idle_watch.stop()
    drafter_of(engine)._proposer = InStep()
    prompts = [PROMPT, [3, 4], [50, 60, 20, 31]]
    outputs = engine.generate(prompts, [greedy(20), greedy(20, logprobs=1), greedy(20)])
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(prompt, 20) for prompt in prompts]
    kill_device(engine)
    assert engine.tokens_of(PROMPT, greedy(20)) == []  # its step fails, as any other's
    assert engine.tokens_of(PROMPT, greedy(20)) == expected(PROMPT, 20)
    engine.worker.shutdown()


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


@pytest.mark.parametrize("wake", ["restart", "and again", "fails first"])
def test_a_device_that_dies_idle_is_replaced_before_anybody_asks(
    engine: Engine, wake: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.one(PROMPT, greedy(20))
    engine.step()  # the engine learns that the request is over
    killed = device_of(engine).pid
    engine.worker._look()
    assert device_of(engine).pid == killed  # nothing to mend

    kill_device(engine)
    if wake == "fails first":
        note_pauses(engine)
        fail_loads(monkeypatch, 1, RemoteDevice)
    engine.worker._look()
    if wake == "and again":
        kill_device(engine)
        note_pauses(engine)
        engine.worker._look()
    assert device_of(engine).is_alive
    assert device_of(engine).pid != killed

    # The prompt's blocks are known to the scheduler as cached, and their contents are gone.
    again = engine.one([*PROMPT, 9], greedy(20))
    assert again.outputs[0].finish_reason == "length"
    assert list(again.outputs[0].token_ids) == expected([*PROMPT, 9], 20)
    assert list(engine.one([*PROMPT, 9, 8], greedy(5)).outputs[0].token_ids) == expected([*PROMPT, 9, 8], 5)


def test_a_device_with_requests_is_left_to_the_next_step(engine: Engine) -> None:
    engine.add("a", PROMPT, greedy(20))
    engine.step(3)
    killed = device_of(engine).pid
    kill_device(engine)
    engine.worker._look()
    assert device_of(engine).pid == killed
    engine.finish()
    assert engine.reasons["a"] == "error"


def test_an_idle_device_that_does_not_come_back_ends_the_next_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    note_pauses(engine)
    fail_loads(monkeypatch, 3, RemoteDevice)
    kill_device(engine)
    with pytest.raises(EngineGivesUp, match="3 attempts"):
        engine.worker._look()
    engine.add("a", PROMPT, greedy(20))
    with pytest.raises(EngineGivesUp, match="3 attempts"):
        engine.finish()
