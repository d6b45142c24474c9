"""A stand-in for torch_neuronx up to 2.9: `trace` exports a graph once and runs that graph on the CPU from then on.

It is as strict as a chip: one size and type per input, no write but through a declared alias, state and weights in the
traced module. It follows the library's documentation, not our backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

__version__ = "2.9.0.2.11.0"

traces: list[Traced] = []
"""Everything traced so far, for tests to look at."""


class Traced:
    """Called with the graph's inputs; gives the outputs that are not aliased."""

    def __init__(
        self, func: nn.Module, inputs: tuple[Tensor, ...], aliases: Mapping[Tensor, int], inline_weights: bool
    ) -> None:
        self.func, self.aliases = func, dict(aliases)
        self.program = torch.export.export(func, inputs, strict=False)
        self.core: int | None = None
        self._inputs = [(tensor.shape, tensor.dtype) for tensor in inputs]
        parameters = dict(func.named_parameters(remove_duplicate=False))
        _check_aliases(aliases, parameters, self.program)
        # Copies: what the chip holds is not what the host holds.
        position = {id(tensor): str(index) for index, tensor in enumerate(aliases)}
        self.states, self.weights = nn.Module(), nn.Module()
        for tensor, index in zip(aliases, position.values(), strict=True):
            self.states.register_parameter(index, nn.Parameter(tensor.clone(), requires_grad=False))
        self._places: list[tuple[nn.Module | None, Any]] = []
        for spec in self.program.graph_signature.input_specs:
            self._places.append(self._place(spec, parameters, position, inline_weights))

    def __call__(self, *arrays: Tensor) -> list[Tensor]:
        found = [(tensor.shape, tensor.dtype) for tensor in arrays]
        if found != self._inputs:
            raise RuntimeError(f"traced for {self._inputs}, called with {found}")
        user = iter(arrays)
        flat = [self._value(home, what, user) for home, what in self._places]
        outputs = self.program.graph_module(*flat)
        for name, index in zip(self.states._parameters, self.aliases.values(), strict=True):
            with torch.no_grad():
                self.states._parameters[name].copy_(outputs[index])  # in place: whoever shares it sees it
        return [output for index, output in enumerate(outputs) if index not in self.aliases.values()]

    def _place(
        self, spec: Any, parameters: Mapping[str, Tensor], position: Mapping[int, str], inline: bool
    ) -> tuple[nn.Module | None, Any]:
        if spec.kind == InputKind.USER_INPUT:
            return None, None
        if spec.kind == InputKind.CONSTANT_TENSOR:
            return None, self.program.constants[spec.target]
        tensor = parameters[spec.target]
        if id(tensor) in position:
            return self.states, position[id(tensor)]
        if inline:
            return None, tensor.clone()
        name = spec.target.replace(".", "->")
        self.weights.register_parameter(name, nn.Parameter(tensor.clone(), requires_grad=False))
        return self.weights, name

    @staticmethod
    def _value(home: nn.Module | None, what: Any, user: Any) -> Any:
        if home is not None:
            return home._parameters[what]
        return next(user) if what is None else what


def _check_aliases(aliases: Mapping[Tensor, int], parameters: Mapping[str, Tensor], program: Any) -> None:
    signature = program.graph_signature
    if signature.buffers_to_mutate or getattr(signature, "user_inputs_to_mutate", None):
        raise RuntimeError("the graph writes to its inputs")
    known = {id(tensor) for tensor in parameters.values()}
    outputs = [node.meta["val"] for node in program.graph.output_node().args[0]]
    if len(set(aliases.values())) != len(aliases):
        raise ValueError("two states have one output")
    for tensor, index in aliases.items():
        if id(tensor) not in known:
            raise ValueError("an aliased tensor is no parameter of the module")
        output = outputs[index]
        if (output.shape, output.dtype) != (tensor.shape, tensor.dtype):
            raise ValueError(
                f"output {index} is {output.shape} {output.dtype}, its state {tensor.shape} {tensor.dtype}"
            )


def trace(
    func: nn.Module,
    example_inputs: Tensor | tuple[Tensor, ...],
    *_: Any,
    input_output_aliases: Mapping[Tensor, int] | None = None,
    compiler_workdir: str | None = None,
    compiler_args: str | list[str] | None = None,
    partitioner_config: Any = None,
    inline_weights_to_neff: bool = True,
    cpu_backend: bool = False,
) -> Traced:
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    traces.append(Traced(func, inputs, input_output_aliases or {}, inline_weights_to_neff))
    return traces[-1]


def move_trace_to_device(traced: Traced, device_id: int) -> None:
    traced.core = device_id
