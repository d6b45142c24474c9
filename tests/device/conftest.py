"""Devices that run the same suite, and the models they run, made once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from neuronserve.neuron_worker.device import core_claims
from neuronserve.neuron_worker.device.base import Device, DeviceOptions
from neuronserve.neuron_worker.device.cpu import device as native
from neuronserve.neuron_worker.device.graph.torch_device import TorchDevice

from .driver import Driver
from .models import LONGEST, Reference, make

BACKENDS = ("torch", "cpu")


@pytest.fixture(params=BACKENDS)
def new_device(request: pytest.FixtureRequest) -> Callable[[], Device]:
    """Makes a device of the backend under test."""
    if request.param == "torch":
        return TorchDevice
    return lambda: native.create(native.CAPABILITIES)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    """A tiny model by its name in `models.CONFIGS`."""
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            made[name] = make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.fixture
def drive(new_device: Callable[[], Device]) -> Iterator[Callable[..., Driver]]:
    """A driver of a freshly loaded device; options as keywords."""
    devices: list[Device] = []

    def start(
        reference: Reference,
        block_size: int = 8,
        prompts_per_call: int = 4,
        draft: Path | None = None,
        num_drafts: int = 3,
        **options: object,
    ) -> Driver:
        num_drafts = 0 if draft is None else num_drafts
        device = new_device()
        devices.append(device)
        device.load(
            str(reference.directory),
            DeviceOptions(
                max_num_seqs=4,
                max_model_len=LONGEST,
                block_size=block_size,
                prompts_per_call=prompts_per_call,
                threads=1,
                num_drafts=num_drafts,
                **options,  # type: ignore[arg-type]
            ),
            None if draft is None else str(draft),
        )
        num_blocks = 1 + 4 * -(-LONGEST // block_size)
        return Driver(
            device,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=LONGEST,
            prompts_per_call=prompts_per_call,
            num_drafts=num_drafts,
        )

    yield start
    for device in devices:
        device.close()


@pytest.fixture(autouse=True)
def no_claimed_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test has a machine's cores to itself."""
    monkeypatch.setattr(core_claims, "FOLDER", tmp_path / "cores")
    monkeypatch.setattr(core_claims, "_held", {})
