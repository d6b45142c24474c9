"""A tiny checkpoint and exports of it, made once; a real vLLM in this process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from neuronserve.neuron_worker import tiny_checkpoint
from neuronserve.server import cli

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a test and its engine share a process
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_checkpoint.write(tmp_path_factory.mktemp("tiny") / "checkpoint")


Export = Callable[..., Path]


@pytest.fixture(scope="session")
def exported(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """An export of the tiny checkpoint with these flags; the same one for the same flags."""
    made: dict[tuple[str, ...], Path] = {}

    def export(*flags: str) -> Path:
        if flags not in made:
            output = tmp_path_factory.mktemp("export") / "out"
            words = [checkpoint, str(output), "--batch-size", "4", "--sequence-length", "64", "--num-cores", "2"]
            assert cli.main(["export", *words, *flags]) == 0
            made[flags] = output
        return made[flags]

    return export
