"""The backend in another interpreter, where the SDK is and this product is not: a prompt, a decode, a copied block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from neuronserve.neuron_worker.device import registry
from neuronserve.neuron_worker.device.base import Device
from neuronserve.neuron_worker.device.torch_neuronx.device import NeuronTorchDevice

from ...tools.bare_python import python_that_finds
from ..driver import Stream, decode, prefill
from ..models import Reference, random_tokens
from .conftest import FAKES
from .test_device import driver


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[Device]:
    device = registry.create("torch-neuronx", python_that_finds(FAKES, tmp_path))
    yield device
    device.close()


def logits_of_a_prompt_and_a_decode(device: Device, model: Reference) -> list[np.ndarray]:
    drive, stream = driver(device, model), Stream(random_tokens(9, 1))
    found = [drive.step([prefill(stream, 8)])[0].logits, drive.step([decode(stream)])[0].logits]
    device.copy_blocks([(1, 2)])
    return [logits.copy() for logits in found if logits is not None]


def test_the_same_logits(
    library: ModuleType,
    make_device: Callable[[], NeuronTorchDevice],
    remote: Device,
    reference: Callable[[str], Reference],
) -> None:
    here = logits_of_a_prompt_and_a_decode(make_device(), reference("llama"))
    there = logits_of_a_prompt_and_a_decode(remote, reference("llama"))
    assert len(here) == 2
    for ours, theirs in zip(here, there, strict=True):
        # The stand-in computes with torch, whose sums depend on how many threads a process has.
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
