"""The backend in another interpreter, where the library is and this product is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker.device import registry
from neuronserve.neuron_worker.device.base import Device
from neuronserve.neuron_worker.device.errors import LoadError

from ...tools.bare_python import python_that_finds
from .conftest import FAKES
from .server import VOCABULARY, Server


@pytest.fixture
def sdk_python(tmp_path: Path) -> str:
    """An interpreter that finds the stand-in."""
    return python_that_finds(FAKES, tmp_path)


@pytest.fixture
def remote() -> Iterator[Callable[[str], Device]]:
    made: list[Device] = []

    def make(python: str) -> Device:
        made.append(registry.create("transformers-neuronx", python))
        return made[-1]

    yield make
    for device in made:
        device.close()


def test_the_same_tokens(
    serve: Callable[..., Server],
    remote: Callable[[str], Device],
    model_dir: Callable[..., str],
    sdk_python: str,
    answers: Any,
) -> None:
    server = serve()
    device: Any = remote(sdk_python)
    facts = device.load(model_dir(), server.options)
    assert facts == server.facts
    device.allocate(4)
    for shape in server.plan.shapes:
        device.compile(shape)
    device.seal()
    server.device = device
    first, second = server.start([5, 6, 7]), server.start([9])
    for _ in range(4):
        server.decode()
    assert first.tokens == answers.greedy([5, 6, 7], 5, VOCABULARY)
    assert second.tokens == answers.greedy([9], 5, VOCABULARY)


def test_an_interpreter_without_the_library_says_so(
    serve: Callable[..., Server], remote: Callable[[str], Device], model_dir: Callable[..., str]
) -> None:
    options = replace(serve().options, tensor_parallel_size=1)
    with pytest.raises(LoadError, match=r"transformers_neuronx cannot be imported"):
        remote(sys.executable).load(model_dir(), options)
