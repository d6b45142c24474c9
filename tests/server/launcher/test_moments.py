"""The log lines hang on functions of vLLM's that must be there."""

from __future__ import annotations

import importlib

import pytest

from neuronserve.server.launcher import moments


@pytest.mark.parametrize("target", [change.target for change in moments.CHANGES])
def test_the_function_is_there(target: str) -> None:
    path, _, name = target.rpartition(".")
    try:
        holder = importlib.import_module(path)
    except ModuleNotFoundError:
        module, _, cls = path.rpartition(".")
        holder = getattr(importlib.import_module(module), cls)
    assert callable(getattr(holder, name))
