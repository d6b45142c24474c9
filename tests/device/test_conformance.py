"""Every device there is, in this process and in another one, through the one suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import pytest

from neuronserve.neuron_worker.device import registry

from .conformance import DeviceConformance, Place, bench
from .models import Reference

__all__ = ["bench"]

REMOTE = os.environ.get("DEVICE_TEST_PYTHON", sys.executable)
"""The other process's interpreter: an environment of numpy and torch alone, where one is at hand."""

PLACES = [
    ("arithmetic", None),
    ("arithmetic", REMOTE),
    ("arithmetic-slots", None),
    ("arithmetic-slots", REMOTE),
    ("cpu-torch", None),
    pytest.param("cpu-torch", REMOTE, marks=pytest.mark.full),
    ("cpu", None),
    ("cpu", REMOTE),
]


def name_of(value: object) -> str:
    return "here" if value is None else "remote" if value == REMOTE else str(value)


@pytest.mark.parametrize(("backend", "python"), PLACES, ids=name_of)
class TestEveryDevice(DeviceConformance):
    @pytest.fixture
    def place(self, backend: str, python: str | None, reference: Callable[[str], Reference]) -> Place:
        directory = str(reference("llama").directory)
        drafts = registry.capabilities(backend).drafts
        return Place(
            lambda: registry.create(backend, python),
            directory,
            directory if drafts else None,
            drafts_itself=not backend.startswith("arithmetic"),
        )
