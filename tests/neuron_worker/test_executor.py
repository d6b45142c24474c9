"""The executor's short way: what the worker gives, or raises, is what vLLM's engine gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from neuronserve.neuron_worker.executor import NeuronExecutor


def an_executor(execute: Any, sample: Any = None) -> NeuronExecutor:
    """Without a worker's start: its own is tested by every engine here."""
    executor = object.__new__(NeuronExecutor)
    worker = SimpleNamespace(execute_model=execute)
    executor.driver_worker = SimpleNamespace(worker=worker, sample_tokens=sample)  # type: ignore[assignment]
    return executor


def test_a_step_is_done_when_it_is_asked_for() -> None:
    executor = an_executor(lambda scheduled: f"output of {scheduled}")
    assert executor.execute_model("a step") == "output of a step"  # type: ignore[arg-type]
    future = executor.execute_model("a step", non_block=True)  # type: ignore[arg-type]
    assert (future.done(), future.exception(), future.result()) == (True, None, "output of a step")
    told: list[object] = []
    future.add_done_callback(told.append)
    assert told == [future]


@pytest.mark.parametrize("non_block", [False, True])
def test_an_error_comes_at_once(non_block: bool) -> None:
    def fail(scheduled: object) -> None:
        raise RuntimeError("no step")

    with pytest.raises(RuntimeError, match="no step"):
        an_executor(fail).execute_model("a step", non_block=non_block)  # type: ignore[arg-type]


def test_vllms_own_way_is_by_name() -> None:
    """Else `NeuronExecutor` can go."""
    executor = an_executor(lambda scheduled: None)
    named: list[object] = []
    executor.collective_rpc = lambda method, **more: named.append(method)  # type: ignore[assignment, method-assign]
    UniProcExecutor.execute_model(executor, "a step")  # type: ignore[arg-type]
    assert named == ["execute_model"]


def test_a_step_that_pauses_is_sampled_as_vllm_does() -> None:
    executor = an_executor(lambda scheduled: None, lambda grammar: f"sampled by {grammar}")
    assert executor.execute_model("a step", non_block=True).result() is None  # type: ignore[arg-type]
    assert executor.sample_tokens("a mask") == "sampled by a mask"  # type: ignore[arg-type]
