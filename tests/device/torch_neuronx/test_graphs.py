"""What can be said of a graph without a chip: static shapes, no branch on data, known operations, no write."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from neuronserve.neuron_worker.device.base import DeviceOptions, StepShape
from neuronserve.neuron_worker.device.graph.decoder import load_model
from neuronserve.neuron_worker.device.graph.torch_ops import empty_cache
from neuronserve.neuron_worker.device.graph.torch_packer import TorchPacker
from neuronserve.neuron_worker.device.graph.torch_sampling import greedy_tokens
from neuronserve.neuron_worker.device.torch_neuronx.allowed_ops import ALLOWED_OPS
from neuronserve.neuron_worker.device.torch_neuronx.step import Caches, CopyGraph, StepGraph, empty_arrays, likeliest
from neuronserve.neuron_worker.device.torch_neuronx.weights import Weights

from ..models import CONFIGS, Reference
from .conftest import options

SHAPES = {
    "decode": StepShape(2, 1, 0, 32),
    "verify": StepShape(2, 3, 0, 32),
    "prefill": StepShape(0, 1, 16, 32),
    "mixed": StepShape(2, 1, 16, 32),
}
ARCHITECTURES = {
    "llama": "llama-biases",
    "mistral": "mistral-window",
    "qwen2": "qwen2-window",
    "qwen3": "qwen3",
    "gpt2": "gpt2",
}
GRAPHS = [(architecture, kind) for architecture in ARCHITECTURES for kind in SHAPES]


def graph_of(reference: Reference, shape: StepShape, **changes: object) -> tuple[StepGraph, tuple[Tensor, ...]]:
    chosen: DeviceOptions = options(**changes)
    model = load_model(reference.directory, chosen, TorchPacker(chosen.dtype))  # type: ignore[arg-type]
    spec = model.spec
    cache = empty_cache(spec.num_layers, 13, chosen.block_size, spec.num_kv_heads, spec.head_dim)
    return StepGraph(Weights(model), Caches(cache), shape), empty_arrays(shape, 2, chosen.block_size)


def exported(graph: nn.Module, inputs: tuple[Tensor, ...]) -> ExportedProgram:
    return torch.export.export(graph, inputs, strict=False)


def operations(program: ExportedProgram) -> Iterator[str]:
    """Names without overloads; `getitem` only takes one of an operation's outputs."""
    for node in program.run_decompositions().graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            assert node.target.namespace == "aten"
            yield node.target.overloadpacket.__name__
        else:
            assert node.op in ("placeholder", "output") or node.target.__name__ == "getitem", node


def check(program: ExportedProgram) -> None:
    assert set(operations(program)) <= ALLOWED_OPS
    assert not program.range_constraints  # no symbolic sizes
    for node in program.graph.nodes:
        values = node.meta.get("val")
        for value in values if isinstance(values, (list, tuple)) else [values]:
            assert value is None or all(type(size) is int for size in value.shape)
    signature = program.graph_signature
    assert not signature.buffers_to_mutate
    assert not signature.user_inputs_to_mutate


def test_every_architecture_is_here() -> None:
    assert {name.split("-")[0] for name in CONFIGS} - {"llama3"} == set(ARCHITECTURES)


@pytest.mark.parametrize(("architecture", "kind"), GRAPHS)
def test_a_graph_is_static_functional_and_of_known_operations(
    architecture: str, kind: str, reference: Callable[[str], Reference]
) -> None:
    graph, inputs = graph_of(reference(ARCHITECTURES[architecture]), SHAPES[kind])
    check(exported(graph, inputs))


@pytest.mark.parametrize("changes", [{"quantization": "int8", "quantize_head": True}, {"dtype": "bfloat16"}])
def test_narrow_weights_need_no_other_operations(
    changes: dict[str, object], reference: Callable[[str], Reference]
) -> None:
    check(exported(*graph_of(reference("llama"), SHAPES["mixed"], **changes)))


def test_the_copying_graph_too(reference: Callable[[str], Reference]) -> None:
    graph, _ = graph_of(reference("llama"), SHAPES["decode"])
    pairs = torch.zeros(3, dtype=torch.int64)
    check(exported(CopyGraph(graph.caches), (pairs, pairs.clone())))


def test_every_allowed_operation_is_used(reference: Callable[[str], Reference]) -> None:
    """Else the list would allow what nobody has looked at."""
    used: set[str] = set()
    for name in ("mistral-window", "gpt2"):
        used |= set(operations(exported(*graph_of(reference(name), SHAPES["mixed"], quantization="int8"))))
    graph, _ = graph_of(reference("llama"), SHAPES["decode"])
    pairs = torch.zeros(3, dtype=torch.int64)
    used |= set(operations(exported(CopyGraph(graph.caches), (pairs, pairs.clone()))))
    assert used == ALLOWED_OPS


@pytest.mark.parametrize("kind", SHAPES)
def test_aliases_are_exactly_the_caches_that_change(kind: str, reference: Callable[[str], Reference]) -> None:
    graph, arrays = graph_of(reference("llama"), SHAPES[kind])
    for array in arrays:
        array.fill_(1)  # one token per row, at position 1 of block 1
    before = [tensor.clone() for tensor in graph.caches.tensors]
    outputs = graph(*arrays)
    aliases = graph.aliases()
    assert {id(tensor) for tensor in aliases} == {id(tensor) for tensor in graph.caches.tensors}
    assert sorted(aliases.values()) == list(range(2, len(outputs)))
    for index, (tensor, position) in enumerate(aliases.items()):
        assert torch.equal(tensor, before[index])  # not written to
        assert outputs[position].shape == tensor.shape
        assert not torch.equal(outputs[position], tensor)  # written anew
    changed = (outputs[2] != before[0]).flatten(2).any(dim=2).nonzero()
    assert {(block, place) for block, place in changed.tolist() if block} == {(1, 1)}


@pytest.mark.parametrize("kind", SHAPES)
def test_constants_are_made_where_the_inputs_are(kind: str, reference: Callable[[str], Reference]) -> None:
    """A tensor of the host among those of the device is an error, on a chip as on torch's `meta`."""
    graph, inputs = graph_of(reference("qwen3"), SHAPES[kind])
    outputs = graph.to("meta")(*(array.to("meta") for array in inputs))
    assert all(output.is_meta for output in outputs)


def test_the_likeliest_is_the_reference_s() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-math.inf, -1.0, -5.0, -1.0], [0.0, 1, 2, 3]])
    assert likeliest(logits).tolist() == greedy_tokens(logits).tolist() == [1, 0, 1, 3]
