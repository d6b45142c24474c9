"""Engines for the tests of this folder. vLLM runs inside the test's process, so a test can look at every step."""

from __future__ import annotations

import os
import sys

# Before anything imports vLLM: it reads its environment once.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from .tiny_model import tiny_model

if TYPE_CHECKING:
    from .engine import Engine


LIBRARY = "transformers_neuronx"
FAKES = str(Path(__file__).resolve().parents[1] / "fakes")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def make_engine(tiny: str) -> Callable[..., Engine]:
    """`make_engine(**arguments of LLM)`: an engine on the arithmetic device."""
    from .engine import Engine

    def make(**arguments: Any) -> Engine:
        return Engine(tiny, **arguments)

    return make


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """A proposer's name -> the arguments of an engine that has it."""
    from .proposers import DRAFTS, NUM_DRAFTS

    drafts = {name: tiny_model(tmp_path_factory.mktemp(name), **form) for name, form in DRAFTS.items()}
    return lambda name: {"speculative_model": drafts.get(name, "ngram"), "num_speculative_tokens": NUM_DRAFTS}


@pytest.fixture(scope="module")
def answers() -> Iterator[Any]:
    """The classic library's stand-in under its real name; this is its module that knows what a model answers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FAKES)
        patch.setenv("NEURON_RT_NUM_CORES", "2")
        yield import_module(f"{LIBRARY}.answers")
    for name in [name for name in sys.modules if name.split(".")[0] == LIBRARY]:
        del sys.modules[name]
