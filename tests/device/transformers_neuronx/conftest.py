"""The stand-in library under its real name, fresh for every test, and servers on it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from . import source
from .server import Server, write_model

FAKES = str(Path(__file__).resolve().parents[2] / "fakes")
NAME = "transformers_neuronx"


def loaded() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == NAME]


@pytest.fixture(params=["stand-in", "source"] if source.PATH else ["stand-in"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Under its real name: the stand-in; with its public source at hand, also that (see `source`)."""
    for name in loaded():
        monkeypatch.delitem(sys.modules, name)
    if request.param == "source":
        with source.imported() as library:
            yield library
        return
    monkeypatch.syspath_prepend(FAKES)
    yield import_module(NAME)
    for name in loaded():
        del sys.modules[name]


@pytest.fixture
def chip(library: Any, request: pytest.FixtureRequest) -> Any:
    return source.chip if is_source(request) else import_module(f"{NAME}.chip")


@pytest.fixture
def answers(library: Any, request: pytest.FixtureRequest) -> Any:
    return source.answers if is_source(request) else import_module(f"{NAME}.answers")


@pytest.fixture
def stand_in_only(library: Any, request: pytest.FixtureRequest) -> None:
    """For what the SDK itself does: names of compiled files, topologies, classes that need other checkpoints."""
    if is_source(request):
        pytest.skip("without the SDK there is nothing to ask")


def is_source(request: pytest.FixtureRequest) -> bool:
    return "source" in request.node.callspec.params.values()


@pytest.fixture
def model_dir(tmp_path: Path) -> Callable[..., str]:
    """`model_dir(name, **changes)`: a checkpoint's directory; changes go into its config.json."""
    return lambda name="model", **changes: write_model(tmp_path / name, **changes)


@pytest.fixture
def serve(library: Any, model_dir: Callable[..., str]) -> Iterator[Callable[..., Server]]:
    """`serve(**options)`: a sealed device with the default plan's shapes."""
    servers: list[Server] = []

    def start(directory: str | None = None, **options: Any) -> Server:
        servers.append(Server(directory or model_dir(), **options))
        return servers[-1]

    yield start
    for server in servers:
        server.device.close()


@pytest.fixture
def make_model(library: Any, model_dir: Callable[..., str]) -> Callable[..., Any]:
    """`make_model(NeuronConfig's fields, **arguments)`: a model of 3 slots on the chip, without our backend."""

    def make(
        config: dict[str, Any] | None = None,
        family: str = "Llama",
        checkpoint: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> Any:
        settings = {"continuous_batching": library.ContinuousBatchingConfig(max_num_seqs=3), **(config or {})}
        defaults = {"batch_size": 3, "n_positions": [16, 32], "context_length_estimate": [8, 16], "tp_degree": 2}
        model = getattr(library, f"{family}ForSampling").from_pretrained(
            model_dir(**(checkpoint or {})),
            neuron_config=library.NeuronConfig(**settings),
            **{**defaults, **arguments},
        )
        model.to_neuron()
        return model

    return make
