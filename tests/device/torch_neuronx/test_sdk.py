"""The seam: which of the two compilers a library gets, and the one for TorchNeuron on a stand-in for its backend."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._lazy import ts_backend

from neuronserve.neuron_worker.device.base import StepShape
from neuronserve.neuron_worker.device.errors import DeviceError, LoadError
from neuronserve.neuron_worker.device.graph.torch_device import TorchDevice
from neuronserve.neuron_worker.device.torch_neuronx import sdk
from neuronserve.neuron_worker.device.torch_neuronx.device import NeuronTorchDevice

from ..driver import Driver, Stream, decode, prefill
from ..models import LONGEST, Reference, random_tokens
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
        compiler.compile(nn.Module(), (), {})


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


@pytest.mark.full
def test_every_graph_of_a_large_plan_is_compiled_once(
    graphs: list[torch.fx.GraphModule],
    library: ModuleType,
    reference: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dynamo refuses the ninth graph of one code object."""
    monkeypatch.setattr(sdk, "load", lambda dtype: sdk.DynamoCompiler(place="cpu"))
    device = NeuronTorchDevice(environ={})
    drive = driver(device, reference("llama"))
    shapes = [StepShape(rows, 1, 0, LONGEST) for rows in range(1, 11)]
    for shape in shapes:
        drive.compile(shape)
    device.seal()
    assert len(graphs) == 11  # the copying is one too
    answers = [first_answer(drive, shape) for shape in shapes]
    device.copy_blocks([(1, 2)])
    assert len(graphs) == 11
    for answer in answers:
        np.testing.assert_allclose(answer, answers[0], atol=1e-5, rtol=0)


def first_answer(drive: Driver, shape: StepShape) -> np.ndarray:
    """The logits of a one-token prompt, run as a decode of this shape."""
    [result] = drive.step([decode(Stream(random_tokens(1, 8)))], shape)
    assert result.logits is not None
    return result.logits


@pytest.mark.full
def test_more_graphs_than_dynamo_compiles_of_one_code_object_in_all(graphs: list[torch.fx.GraphModule]) -> None:
    """The largest plan has 256 shapes, and the copying of blocks is a graph too."""
    compiler = sdk.DynamoCompiler(place="cpu")
    state = nn.Parameter(torch.zeros(1), requires_grad=False)
    with torch.no_grad():
        for size in range(1, 258):
            compiler.compile(Sum(state), (torch.zeros(size),), {state: 1})
    assert len(graphs) == 257


@pytest.fixture
def elsewhere(graphs: list[torch.fx.GraphModule], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A memory apart from the host's, as a chip's is: `to` copies what is not there yet, and `Module.to` cannot turn
    the host's parameters into ones of there, so it puts others in their place."""
    there: list[Tensor] = []  # kept, so that no address is used twice
    to = Tensor.to

    def move(tensor: Tensor, *what: Any, **how: Any) -> Tensor:
        is_real = type(tensor) in (Tensor, nn.Parameter)  # and none of those that a compiler traces with
        to_a_place = any(isinstance(value, (str, torch.device)) for value in what)
        if not is_real or not to_a_place or tensor.data_ptr() in {moved.data_ptr() for moved in there}:
            return to(tensor, *what, **how)
        there.append(tensor.clone())
        return there[-1]

    monkeypatch.setattr(Tensor, "to", move)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield "cpu"
    torch.__future__.set_overwrite_module_params_on_conversion(False)


def test_graphs_of_a_memory_apart_read_what_the_others_wrote(
    elsewhere: str,
    graphs: list[torch.fx.GraphModule],
    library: ModuleType,
    reference: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdk, "load", lambda dtype: sdk.DynamoCompiler(place=elsewhere))
    expected = a_schedule(driver(TorchDevice(), reference("llama")))
    found = a_schedule(driver(NeuronTorchDevice(environ={}), reference("llama")))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)
    assert len(graphs) == 4  # none compiled anew because its tensors are others by now


def test_a_copied_block_is_the_block_that_was_written_there(
    elsewhere: str, library: ModuleType, reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdk, "load", lambda dtype: sdk.DynamoCompiler(place=elsewhere))
    device = NeuronTorchDevice(environ={})
    drive = driver(device, reference("llama"))
    device.copy_blocks([(3, 4)])  # the copying is the first graph of all: it moves the caches
    stream = Stream(random_tokens(9, 4), blocks=[1, 3])
    drive.step([prefill(stream, 8)])
    device.copy_blocks([(1, 2)])
    copied = Stream(stream.tokens, blocks=[2, 4], computed=8)
    ours, theirs = drive.step([decode(copied), decode(stream)])
    assert ours.logits is not None
    np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-5, rtol=0)


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> str:
    """A device of torch's own that is none of its dense kinds, as a chip is none. Dynamo cannot trace its tensors, so
    graphs run there as they are."""
    start_lazy_device()
    here = torch.zeros(1)
    assert not torch._has_compatible_shallow_copy_type(here, here.to("lazy"))
    monkeypatch.setattr(torch, "compile", lambda step, **_: step)
    return "lazy"


@cache
def start_lazy_device() -> None:
    ts_backend.init()


class Sum(nn.Module):
    """Adds its input to its state. [size] -> the new state twice."""

    def __init__(self, state: nn.Parameter) -> None:
        super().__init__()
        self.state = state

    def forward(self, value: Tensor) -> tuple[Tensor, ...]:
        total = self.state + value.sum()
        return total.clone(), total


def test_graphs_that_share_a_tensor_and_no_module_share_it_on_the_chip(lazy: str) -> None:
    compiler = sdk.DynamoCompiler(place=lazy)
    state = nn.Parameter(torch.zeros(1), requires_grad=False)
    with torch.no_grad():
        first = compiler.compile(Sum(state), (torch.zeros(1),), {state: 1})
        second = compiler.compile(Sum(state), (torch.zeros(1),), {state: 1})
        found = [step(torch.ones(1))[0].item() for step in (first, second, first)]
    assert found == [1, 2, 3]
