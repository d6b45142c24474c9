"""The suite that every device passes, on the stand-in SDK."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from neuronserve.neuron_worker.device import registry
from neuronserve.neuron_worker.device.torch_neuronx.device import NeuronTorchDevice

from ...tools.bare_python import python_that_finds
from ..conformance import DeviceConformance, Place, bench
from ..models import Reference
from .conftest import FAKES

__all__ = ["bench"]


class TestTorchNeuronx(DeviceConformance):
    @pytest.fixture(params=["here", pytest.param("remote", marks=pytest.mark.full)])
    def place(
        self,
        request: pytest.FixtureRequest,
        tmp_path: Path,
        library: ModuleType,
        reference: Callable[[str], Reference],
        make_device: Callable[[], NeuronTorchDevice],
    ) -> Place:
        model = str(reference("llama").directory)
        if request.param == "here":
            return Place(make_device, model)
        python = python_that_finds(FAKES, tmp_path)
        return Place(lambda: registry.create("torch-neuronx", python), model)
