"""The README's table of devices says what their capabilities say."""

from __future__ import annotations

from dataclasses import fields
from types import ModuleType

import pytest

from neuronserve.neuron_worker.device import registry
from neuronserve.neuron_worker.device.base import Capabilities
from neuronserve.neuron_worker.device.transformers_neuronx.checkpoint import ARCHITECTURES

from .scripts import ROOT, load


@pytest.fixture
def script() -> ModuleType:
    return load("device_table")


def test_the_readme_has_todays_table(script: ModuleType) -> None:
    readme = (ROOT / "README.md").read_text()
    assert readme == script.written(readme), "run: python scripts/device_table.py --write"


def test_another_table_in_the_readme_would_be_replaced(script: ModuleType) -> None:
    old = f"before\n{script.BEGIN}| old |\n{script.END}after\n"
    assert script.written(old) == f"before\n{script.BEGIN}{script.table()}{script.END}after\n"


def test_every_device_that_is_built_is_in_it(script: ModuleType) -> None:
    head = script.table().splitlines()[0]
    assert all(f"`{name}`" in head for name in ("cpu", "transformers-neuronx"))


NO_FEATURES = {
    "name": "the head of a column",
    "all_live_rows_in_decode": "how the scheduler must call it; every request is served either way",
    "default_max_num_seqs": "a default, which `neuronserve plan` prints",
    "default_max_graphs": "a bound of the default ladder, which `neuronserve plan` prints",
    "fine_prefill_ladder": "a choice of the default ladder",
}


def test_a_new_capability_gets_a_row_or_is_left_out_on_purpose(script: ModuleType) -> None:
    """A field that is in neither list was added without a thought for who chooses a device."""
    rows = shown(script)
    assert rows.isdisjoint(NO_FEATURES)
    assert {field.name for field in fields(Capabilities)} == rows | NO_FEATURES.keys()


def shown(script: ModuleType) -> set[str]:
    """What the table's rows read."""
    read = set()

    class Noted:
        def __init__(self, capabilities: Capabilities) -> None:
            self.capabilities = capabilities

        def __getattr__(self, name: str) -> object:
            read.add(name)
            return getattr(self.capabilities, name)

    for device in script.DEVICES:
        for _, say in script.FEATURES:
            say(Noted(registry.capabilities(device)))
    return read


def test_an_architecture_that_the_table_calls_experimental_is(script: ModuleType) -> None:
    more = {name for device in script.DEVICES for name in registry.capabilities(device).more_architectures}
    assert more == {each.name for each in ARCHITECTURES.values() if each.is_experimental} != set()
