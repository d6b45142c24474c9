"""The suite that every device passes, on the stand-in library."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from neuronserve.neuron_worker import reference
from neuronserve.neuron_worker.device import registry
from neuronserve.neuron_worker.device.base import Capabilities, DeviceOptions
from neuronserve.neuron_worker.device.transformers_neuronx.device import NeuronxDevice

from ...tools.bare_python import python_that_finds
from ...tools.stand_in_answers import by_the_stand_in
from ..conformance import LONGEST, Bench, DeviceConformance, Place
from .conftest import FAKES


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
    @pytest.fixture(autouse=True)
    def rule(self, library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reference, "logits_of", by_the_stand_in)

    @pytest.fixture(params=["here", pytest.param("remote", marks=pytest.mark.full)])
    def place(
        self, request: pytest.FixtureRequest, library: ModuleType, model_dir: Callable[..., str], tmp_path: Path
    ) -> Place:
        model = model_dir(vocab_size=100, max_position_embeddings=LONGEST)
        if request.param == "here":
            return Place(lambda: NeuronxDevice(environ={}), model)
        python = python_that_finds(FAKES, tmp_path)
        return Place(lambda: registry.create("transformers-neuronx", python), model)
