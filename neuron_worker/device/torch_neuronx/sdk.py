"""The one place where the SDK is called: two ways to compile a module with state, told apart by the library's version.

    torch_neuronx up to 2.9      `torch_neuronx.trace` with input_output_aliases (Inf2, Trn1)
    torch_neuronx from 2.13 on   `torch.compile(backend="neuron")` (Trn2, Trn3)

Either way the caches live on the chip, one copy for all graphs, and a call gives the results alone. Knows no model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import import_module
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import DeviceError, LoadError

LIBRARY = "torch_neuronx"
LAST_TRACED, FIRST_COMPILED = (2, 9), (2, 13)
REMEDY = (
    "install torch-neuronx of Neuron SDK 2.31 (torch 2.9: Inf2, Trn1) or TorchNeuron 2.13 (Trn2, Trn3) in the Python "
    "that runs the device (device_python), or choose another backend"
)
_CAST_TYPES = {"bfloat16": "bf16", "float16": "fp16"}

Compiled = Callable[..., "tuple[Tensor, ...]"]


class Compiler(Protocol):
    """Made by `load`."""

    @property
    def name(self) -> str: ...

    def compile(self, graph: nn.Module, inputs: tuple[Tensor, ...], aliases: Mapping[Tensor, int]) -> Compiled:
        """`graph` for inputs of these sizes. Its outputs without the aliased ones, which replace the state."""


class TraceCompiler:
    """Weights and state are parameters of each traced module; all but the first module take over the first one's."""

    name = "torch_neuronx.trace"

    def __init__(self, library: Any, dtype: str) -> None:
        self._library = library
        self._arguments = compiler_arguments(dtype)
        self._shared: dict[str, Any] = {}

    def compile(self, graph: nn.Module, inputs: tuple[Tensor, ...], aliases: Mapping[Tensor, int]) -> Compiled:
        traced = self._library.trace(
            graph,
            inputs,
            input_output_aliases=dict(aliases),
            compiler_args=self._arguments,
            inline_weights_to_neff=False,
        )
        self._library.move_trace_to_device(traced, 0)  # the first of the cores this process may use
        self._share("states", traced)
        self._share("weights", traced)
        return lambda *arrays: tuple(traced(*arrays))

    def _share(self, kind: str, traced: Any) -> None:
        """One copy on the chip: what a graph writes to its state, the others must read."""
        own = getattr(traced, kind, None)
        if own is None or not own._parameters:
            if kind == "states":
                raise DeviceError(f"{self.name} gave a module without state: its caches would not be kept; {REMEDY}")
            return
        # By name; a graph without weights does not decide what the others share.
        shared = self._shared.setdefault(kind, {})
        for name in own._parameters:
            own._parameters[name] = shared.setdefault(name, own._parameters[name])


class DynamoCompiler:
    """Weights and state are moved to the chip once; a graph ends by writing its new state over the old."""

    name = 'torch.compile(backend="neuron")'

    def __init__(self, place: str = "neuron") -> None:
        self._place = place
        self._moved: dict[Tensor, nn.Parameter] = {}  # by what it was on the host, and by itself

    def compile(self, graph: nn.Module, inputs: tuple[Tensor, ...], aliases: Mapping[Tensor, int]) -> Compiled:
        self._move(graph)
        outputs = {index: self._moved[tensor] for tensor, index in aliases.items()}
        compiled = torch.compile(_overwriting(graph, outputs), backend="neuron", fullgraph=True, dynamic=False)

        def call(*arrays: Tensor) -> tuple[Tensor, ...]:
            return tuple(result.cpu() for result in compiled(*(array.to(self._place) for array in arrays)))

        call(*inputs)  # compiles; padding alone writes to the scratch block
        return call

    def _move(self, graph: nn.Module) -> None:
        """Not by `Module.to`: a chip's tensor may not fit into the host's parameter, and then every module that has
        the parameter gets one of its own, and what one graph writes the others never read."""
        for module in graph.modules():
            for name, tensor in module.named_parameters(recurse=False, remove_duplicate=False):
                setattr(module, name, self._on_chip(tensor))

    def _on_chip(self, tensor: Tensor) -> nn.Parameter:
        if tensor not in self._moved:
            moved = nn.Parameter(tensor.to(self._place), requires_grad=False)
            self._moved[tensor] = self._moved[moved] = moved
            tensor.data = torch.empty(0, dtype=tensor.dtype)  # the host's memory is given back, nothing stale is read
        return self._moved[tensor]


def _overwriting(graph: nn.Module, state: Mapping[int, Tensor]) -> Compiled:
    """`graph` with each of the outputs in `state` written over its tensor instead of given back.

    Dynamo counts what it compiled by code object and refuses a ninth (`recompile_limit`); functions of one text share
    theirs, so every graph gets a copy. Its `isolate_recompiles` would do up to 256 graphs in a process's life
    (`accumulated_recompile_limit`), fewer than the largest plan and its copying of blocks.
    """

    def step(*arrays: Tensor) -> tuple[Tensor, ...]:
        outputs = graph(*arrays)
        for index, tensor in state.items():
            tensor.copy_(outputs[index])
        return tuple(output for index, output in enumerate(outputs) if index not in state)

    return FunctionType(step.__code__.replace(), step.__globals__, step.__name__, closure=step.__closure__)


def load(dtype: str) -> Compiler:
    try:
        library = import_module(LIBRARY)
    except Exception as error:  # its dependencies fail in many ways when their versions do not fit
        raise LoadError(f"{LIBRARY} cannot be imported ({type(error).__name__}: {error}); {REMEDY}") from error
    version = str(getattr(library, "__version__", "unknown"))
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None or int(numbers[1]) < 2:
        raise LoadError(f"{LIBRARY} {version} is a placeholder package, not the SDK's; {REMEDY}")
    torch_version = int(numbers[1]), int(numbers[2])
    if torch_version <= LAST_TRACED:
        return TraceCompiler(library, dtype)
    if torch_version >= FIRST_COMPILED:
        return DynamoCompiler()
    raise LoadError(f"{LIBRARY} {version} is between what traces (up to 2.9) and TorchNeuron (from 2.13); {REMEDY}")


def compiler_arguments(dtype: str) -> list[str]:
    """float32 stays float32; a narrower type is what matrices are multiplied in."""
    cast = ["--auto-cast", "none"]
    if dtype in _CAST_TYPES:
        cast = ["--auto-cast", "matmult", "--auto-cast-type", _CAST_TYPES[dtype]]
    return ["--model-type", "transformer", *cast]
