"""Every device there is, in this process and in another one, through the one suite."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from neuronserve.neuron_worker.device import registry

from .conformance import DeviceConformance, Place, bench
from .draft_conformance import DraftConformance
from .eagle_heads import REDUCED, make_head
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
        return Place(lambda: registry.create(backend, python), str(reference("llama").directory))


DRAFTS = [
    ("arithmetic", None, "itself"),
    ("arithmetic", REMOTE, "itself"),
    *[("cpu-torch", None, draft) for draft in ("itself", "another", "eagle", "eagle3")],
    *[("cpu", None, draft) for draft in ("itself", "another", "eagle", "eagle reduced", "eagle3")],
    ("cpu", REMOTE, "another"),
    ("cpu", REMOTE, "eagle reduced"),
]


@pytest.mark.parametrize(("backend", "python", "draft"), DRAFTS, ids=name_of)
class TestEveryDraft(DraftConformance):
    @pytest.fixture
    def place(
        self, backend: str, python: str | None, draft: str, reference: Callable[[str], Reference], tmp_path: Path
    ) -> Place:
        model = reference("llama")
        directory = model.directory
        if draft == "another":
            directory = reference("qwen3").directory
        elif draft.startswith("eagle"):
            taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]} if draft == "eagle3" else {}
            tokens = REDUCED if draft == "eagle reduced" else None
            directory = make_head(tmp_path, model, draft.split()[0], tokens=tokens, **taps).directory
        is_exact = draft == "itself" and backend != "arithmetic"
        return Place(lambda: registry.create(backend, python), str(model.directory), str(directory), is_exact)
