"""The seam: which of the two compilers a library gets, and the one for TorchNeuron on a stand-in for its backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd

from neuronserve.neuron_worker.device.errors import DeviceError, LoadError
from neuronserve.neuron_worker.device.graph.torch_device import TorchDevice
from neuronserve.neuron_worker.device.torch_neuronx import sdk
from neuronserve.neuron_worker.device.torch_neuronx.device import NeuronTorchDevice

from ..models import Reference
from .conftest import NAME
from .test_device import a_schedule, driver


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("2.7.0.2.8.6734", "torch_neuronx.trace"),
        ("2.9.0.2.11.0", "torch_neuronx.trace"),
        ("2.13.0.1", 'torch.compile(backend="neuron")'),
    ],
)
def test_the_compiler_follows_the_library_s_version(version: str, name: str, library: ModuleType) -> None:
    library.__version__ = version
    assert sdk.load("float32").name == name


@pytest.mark.parametrize(
    ("version", "message"), [("1.0", "placeholder"), ("unknown", "placeholder"), ("2.11.0", "2.11.0 is between")]
)
def test_other_libraries_are_refused_with_the_remedy(version: str, message: str, library: ModuleType) -> None:
    library.__version__ = version
    with pytest.raises(LoadError, match=rf"{message}.*Neuron SDK 2\.31"):
        sdk.load("float32")


def test_without_the_sdk_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, NAME, None)
    with pytest.raises(LoadError, match=r"torch_neuronx cannot be imported.*device_python"):
        sdk.load("float32")


@pytest.mark.parametrize(
    ("dtype", "arguments"),
    [
        ("float32", ["--auto-cast", "none"]),
        ("bfloat16", ["--auto-cast", "matmult", "--auto-cast-type", "bf16"]),
        ("float16", ["--auto-cast", "matmult", "--auto-cast-type", "fp16"]),
    ],
)
def test_float32_is_never_narrowed(dtype: str, arguments: list[str]) -> None:
    assert sdk.compiler_arguments(dtype)[-len(arguments) :] == arguments


def test_a_module_without_state_is_an_error() -> None:
    library = SimpleNamespace(trace=lambda *_, **__: SimpleNamespace(), move_trace_to_device=lambda *_: None)
    compiler = sdk.TraceCompiler(library, "float32")
    with pytest.raises(DeviceError, match="without state"):
        compiler.compile(torch.nn.Module(), (), {})


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.fx.GraphModule]]:
    """What the backend called `neuron` was given, each graph once."""
    from torch._dynamo.backends import registry

    given: list[torch.fx.GraphModule] = []

    def take(graph: torch.fx.GraphModule, inputs: Any) -> torch.fx.GraphModule:
        given.append(graph)
        return graph

    torch._dynamo.reset()
    registry.list_backends()  # fills the table
    monkeypatch.setitem(registry._BACKENDS, "neuron", None)
    monkeypatch.setitem(registry._COMPILER_FNS, "neuron", aot_autograd(fw_compiler=take))
    yield given
    torch._dynamo.reset()


def test_the_other_compiler_gives_the_same_results(
    graphs: list[torch.fx.GraphModule],
    library: ModuleType,
    reference: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdk, "load", lambda dtype: sdk.DynamoCompiler(place="cpu"))
    expected = a_schedule(driver(TorchDevice(), reference("llama")))
    found = a_schedule(driver(NeuronTorchDevice(environ={}), reference("llama")))
    for ours, theirs in zip(found, expected, strict=True):
        assert abs(ours - theirs).max() <= 1e-5
    assert len(graphs) == 4  # a graph per shape, none compiled twice
    assert not library.traces
