"""Backends by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from neuronserve.neuron_worker.device import registry


def test_auto_is_the_embedded_device() -> None:
    assert registry.choose("auto") == "cpu"


def test_an_unknown_backend_lists_the_known_ones() -> None:
    with pytest.raises(registry.UnknownBackend, match=r"'gpu' is not known; use one of auto, cpu"):
        registry.capabilities("gpu")


def test_creates_what_it_describes() -> None:
    device = registry.create("arithmetic-slots")
    assert device.capabilities is registry.capabilities("arithmetic-slots")


@pytest.mark.parametrize("name", ["cpu", "arithmetic", "arithmetic-slots", "transformers-neuronx", "torch-neuronx"])
def test_capabilities_are_known_without_torch(name: str) -> None:
    code = (
        "import sys; from neuronserve.neuron_worker.device import registry; "
        f"registry.capabilities({name!r}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
