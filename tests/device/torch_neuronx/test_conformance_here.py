"""The suite that every device passes, on the stand-in SDK."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest

from neuronserve.neuron_worker.device.torch_neuronx.device import NeuronTorchDevice

from ..conformance import DeviceConformance, Place, bench
from ..models import Reference

__all__ = ["bench"]


class TestTorchNeuronx(DeviceConformance):
    @pytest.fixture
    def place(
        self,
        library: ModuleType,
        reference: Callable[[str], Reference],
        make_device: Callable[[], NeuronTorchDevice],
    ) -> Place:
        return Place(make_device, str(reference("llama").directory))
