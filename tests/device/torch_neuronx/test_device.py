"""The backend on the stand-in SDK: the CPU device's results, one state for all graphs, refusals by name."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import numpy as np
import pytest

from neuronserve.neuron_worker.device.base import Device, StepShape, Want
from neuronserve.neuron_worker.device.errors import DeviceError, DeviceLost, DoesNotFit, LoadError, UnsupportedModel
from neuronserve.neuron_worker.device.graph.torch_device import TorchDevice
from neuronserve.neuron_worker.device.torch_neuronx.device import NeuronTorchDevice

from ..driver import Driver, Sampling, Stream, decode, prefill
from ..models import LONGEST, Reference, random_tokens
from .conftest import options

NUM_BLOCKS = 25


def driver(device: Device, model: Reference, **changes: object) -> Driver:
    device.load(str(model.directory), options(**changes))
    return Driver(device, block_size=8, num_blocks=NUM_BLOCKS, max_model_len=LONGEST, prompts_per_call=2)


def a_schedule(driver: Driver) -> list[np.ndarray]:
    """Prefill, a chunk beside a decode, two decodes, a verify, a draw: everything that comes back."""
    first, second = Stream(random_tokens(11, 1)), Stream(random_tokens(9, 2))
    first.tokens += random_tokens(6, 3)
    found = []
    drawn = Sampling(temperature=1.3, top_k=20, top_p=0.9, uniforms=(0.4,))
    steps = (
        [prefill(first, 11)],
        [decode(first), prefill(second, 4, want=Want.NOTHING)],
        [decode(first), prefill(second, 4, want=Want.TOKEN, sampling=drawn)],
        [decode(first, 3), decode(second)],
        [decode(first, want=Want.TOKEN)],
    )
    for rows in steps:
        for result in driver.step(rows):
            found += [result.tokens] if result.logits is None else [result.logits]
    return found


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("mistral-window", {}),
        ("qwen2-window", {}),
        ("qwen3", {"dtype": "bfloat16"}),
        ("gpt2-scales", {"quantization": "int8"}),
    ],
)
def test_results_are_the_cpu_device_s(
    name: str, changes: dict[str, object], device: NeuronTorchDevice, reference: Callable[[str], Reference]
) -> None:
    expected = a_schedule(driver(TorchDevice(), reference(name), **changes))
    found = a_schedule(driver(device, reference(name), **changes))
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)


def test_all_graphs_have_one_copy_of_weights_and_caches(
    library: ModuleType, device: NeuronTorchDevice, reference: Callable[[str], Reference]
) -> None:
    device.load(str(reference("llama").directory), options())
    device.allocate(NUM_BLOCKS)
    device.compile(StepShape(2, 1, 0, 32))
    device.compile(StepShape(0, 1, 16, 32))
    device.seal()
    first, second, copying = library.traces
    assert first.states._parameters
    assert first.weights._parameters
    for kind in ("states", "weights"):
        one, other = getattr(first, kind)._parameters, getattr(second, kind)._parameters
        assert [id(tensor) for tensor in one.values()] == [id(tensor) for tensor in other.values()]
    assert [id(t) for t in copying.states._parameters.values()] == [id(t) for t in first.states._parameters.values()]
    assert {trace.core for trace in library.traces} == {0}


def test_a_shape_is_traced_once_and_nothing_after_the_seal(
    library: ModuleType, device: NeuronTorchDevice, reference: Callable[[str], Reference]
) -> None:
    device.load(str(reference("llama").directory), options())
    device.allocate(NUM_BLOCKS)
    device.compile(StepShape(2, 1, 0, 32))
    device.compile(StepShape(2, 1, 0, 32))
    device.seal()
    device.copy_blocks([(1, 2)])
    assert len(library.traces) == 2  # the step and the copying


def test_more_copies_than_one_call_takes(device: NeuronTorchDevice, reference: Callable[[str], Reference]) -> None:
    drive = driver(device, reference("llama"))
    stream = Stream(random_tokens(30, 4))
    drive.step([prefill(stream, 29)])
    free = [block for block in range(1, NUM_BLOCKS) if block not in stream.blocks]
    pairs = [(block, free[index]) for index, block in enumerate(stream.blocks)]
    device.copy_blocks([(free[-1], block) for block in free[4:-1]] + pairs)  # more than 16
    copy = Stream(list(stream.tokens), blocks=[target for _, target in pairs], computed=29)
    ours, theirs = drive.step([decode(copy), decode(stream)])
    assert ours.logits is not None
    assert theirs.logits is not None
    np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-5, rtol=0)
    assert np.abs(ours.logits).max() > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensor_parallel_size": 2},
            r"--tensor-parallel-size 2.*one core.*NEURON_RT_VISIBLE_CORES of its own.*transformers-neuronx",
        ),
        ({"neuron_config": {"fuse_qkv": True}}, r"override_neuron_config: fuse_qkv"),
        ({"dtype": "float8"}, r"dtype is 'float8'"),
        ({"quantization": "f8e4m3fn"}, r"quantization is 'f8e4m3fn'"),
        ({"require_artifacts": True}, r"require_cached: .* cannot be told not to"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    changes: dict[str, object], message: str, device: NeuronTorchDevice, reference: Callable[[str], Reference]
) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        device.load(str(reference("llama").directory), options(**changes))


def test_a_draft_is_refused(device: NeuronTorchDevice, reference: Callable[[str], Reference]) -> None:
    directory = str(reference("llama").directory)
    with pytest.raises(UnsupportedModel, match="does not speculate inside the device"):
        device.load(directory, options(), directory)


def test_several_machines_are_refused_by_name(library: ModuleType, reference: Callable[[str], Reference]) -> None:
    device = NeuronTorchDevice(environ={"NEURON_RANK_ID": "1"})
    with pytest.raises(LoadError, match="NEURON_RANK_ID=1"):
        device.load(str(reference("llama").directory), options())


def test_one_core_is_claimed(library: ModuleType, reference: Callable[[str], Reference]) -> None:
    environ: dict[str, str] = {}
    NeuronTorchDevice(environ=environ).load(str(reference("llama").directory), options())
    assert environ == {"NEURON_RT_NUM_CORES": "1"}


def test_scores_of_a_prompt_are_refused(device: NeuronTorchDevice, reference: Callable[[str], Reference]) -> None:
    drive = driver(device, reference("llama"))
    stream = Stream(random_tokens(9, 5))
    with pytest.raises(DeviceError, match="prompt log-probabilities"):
        drive.step([prefill(stream, 8, scored=True)])


def test_an_index_beyond_the_cache_never_reaches_the_chip(
    library: ModuleType, device: NeuronTorchDevice, reference: Callable[[str], Reference]
) -> None:
    drive = driver(device, reference("llama"))
    for stream in (
        Stream(random_tokens(9, 6), blocks=[NUM_BLOCKS, 1]),
        Stream([*random_tokens(8, 6), 5000], blocks=[1, 2]),
        Stream(random_tokens(60, 6), blocks=[1] * 12, computed=50),
    ):
        row = prefill(stream, 9)
        shape = StepShape(0, 1, 16, 32)
        drive.compile(shape)
        with pytest.raises(DoesNotFit):
            device.run(drive.pack([row], shape))


def test_a_runtime_that_fails_is_a_lost_device(
    library: ModuleType,
    device: NeuronTorchDevice,
    reference: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: object, *arrays: object) -> None:
        raise RuntimeError("NRT_EXEC_HW_ERR")

    drive = driver(device, reference("llama"))
    drive.compile(StepShape(0, 1, 16, 32))
    monkeypatch.setattr(library.Traced, "__call__", fail)
    with pytest.raises(DeviceLost, match="NRT_EXEC_HW_ERR"):
        drive.step([prefill(Stream(random_tokens(9, 7)), 9)], StepShape(0, 1, 16, 32))


def test_a_compiler_that_fails_names_the_shape(
    library: ModuleType,
    device: NeuronTorchDevice,
    reference: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **keywords: object) -> None:
        raise ValueError("neuronx-cc failed with 70")

    monkeypatch.setattr(library, "trace", fail)
    device.load(str(reference("llama").directory), options())
    device.allocate(NUM_BLOCKS)
    with pytest.raises(DeviceError, match=r"failed to compile StepShape\(decode_rows=2.*failed with 70"):
        device.compile(StepShape(2, 1, 0, 32))


def test_the_cache_s_size_is_settled_before_the_first_graph(
    device: NeuronTorchDevice, reference: Callable[[str], Reference]
) -> None:
    device.load(str(reference("llama").directory), options())
    with pytest.raises(DeviceError, match="allocate comes first"):
        device.compile(StepShape(2, 1, 0, 32))
    device.allocate(NUM_BLOCKS)
    device.compile(StepShape(2, 1, 0, 32))
    with pytest.raises(DeviceError, match="allocate after compile"):
        device.allocate(NUM_BLOCKS)
