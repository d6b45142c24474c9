"""The suite that every device passes, on the stand-in library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType

import pytest

from neuronserve.neuron_worker.device.base import Capabilities, DeviceOptions
from neuronserve.neuron_worker.device.transformers_neuronx.device import NeuronxDevice

from ..conformance import LONGEST, Bench, DeviceConformance, Place


class SlotBench(Bench):
    """A slot for each of the blocks the suite hands out: none of them comes back."""

    def options(self, capabilities: Capabilities) -> DeviceOptions:
        return replace(super().options(capabilities), max_num_seqs=12)


@pytest.fixture
def bench(place: Place) -> Iterator[Bench]:
    bench = SlotBench(place)
    yield bench
    bench.close()


class TestTransformersNeuronx(DeviceConformance):
    @pytest.fixture
    def place(self, library: ModuleType, model_dir: Callable[..., str]) -> Place:
        return Place(lambda: NeuronxDevice(environ={}), model_dir(vocab_size=100, max_position_embeddings=LONGEST))
