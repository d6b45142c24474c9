"""The stand-in SDK under its real name, fresh for every test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from neuronserve.neuron_worker.device.base import DeviceOptions
from neuronserve.neuron_worker.device.torch_neuronx.device import NeuronTorchDevice

from ..models import LONGEST

FAKES = str(Path(__file__).resolve().parents[2] / "fakes")
NAME = "torch_neuronx"


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    monkeypatch.syspath_prepend(FAKES)
    yield import_module(NAME)
    del sys.modules[NAME]


def options(**changes: object) -> DeviceOptions:
    settings: dict[str, object] = {
        "max_num_seqs": 4,
        "max_model_len": LONGEST,
        "block_size": 8,
        "prompts_per_call": 2,
        "threads": 1,
    }
    return DeviceOptions(**{**settings, **changes})  # type: ignore[arg-type]


@pytest.fixture
def device(library: ModuleType) -> Iterator[NeuronTorchDevice]:
    device = NeuronTorchDevice(environ={})
    yield device
    device.close()


@pytest.fixture
def make_device(library: ModuleType) -> Callable[[], NeuronTorchDevice]:
    return lambda: NeuronTorchDevice(environ={})
