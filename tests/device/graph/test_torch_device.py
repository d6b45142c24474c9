"""The reference device's own manners: what it refuses, and how."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from neuronserve.neuron_worker.device.base import DeviceOptions, StepShape
from neuronserve.neuron_worker.device.errors import (
    DeviceError,
    DoesNotFit,
    LoadError,
    UncompiledShape,
    UnsupportedModel,
)
from neuronserve.neuron_worker.device.graph.torch_device import TorchDevice

from ..driver import Driver, Stream, prefill
from ..models import LONGEST

OPTIONS = DeviceOptions(max_num_seqs=4, max_model_len=LONGEST, block_size=8, prompts_per_call=4, threads=1)
SHAPE = StepShape(0, 1, 16, LONGEST)


@pytest.fixture
def loaded(reference) -> TorchDevice:
    device = TorchDevice()
    device.load(str(reference("llama").directory), OPTIONS)
    return device


def driver_of(device: TorchDevice) -> Driver:
    return Driver(device, block_size=8, num_blocks=20, max_model_len=LONGEST)


def test_an_uncompiled_shape_is_refused(loaded: TorchDevice) -> None:
    driver, stream = driver_of(loaded), Stream([1, 2, 3], [1])
    batch = driver.pack([prefill(stream, 3)], SHAPE)
    with pytest.raises(UncompiledShape, match="never compiled"):
        loaded.run(batch)


def test_nothing_compiles_after_seal(loaded: TorchDevice) -> None:
    loaded.seal()
    with pytest.raises(UncompiledShape):
        loaded.compile(SHAPE)


def test_a_context_above_the_model_length_is_refused(loaded: TorchDevice) -> None:
    with pytest.raises(DoesNotFit, match=f"max_model_len {LONGEST}"):
        loaded.compile(dataclasses.replace(SHAPE, context=LONGEST + 1))


@pytest.mark.parametrize("token", [-1, 160])
def test_a_token_outside_the_vocabulary_is_refused(token: int, loaded: TorchDevice) -> None:
    driver, stream = driver_of(loaded), Stream([1, token, 3])
    with pytest.raises(DoesNotFit, match="0 to 159"):
        driver.step([prefill(stream, 3)])


def test_the_order_of_calls_is_kept(loaded: TorchDevice) -> None:
    batch = Driver(loaded, block_size=8, num_blocks=4, max_model_len=LONGEST).pack([], SHAPE)
    with pytest.raises(DeviceError, match="call load first"):
        TorchDevice().run(batch)


def test_a_closed_device_holds_nothing(loaded: TorchDevice) -> None:
    loaded.close()
    loaded.close()
    with pytest.raises(DeviceError, match="no model"):
        loaded.allocate(4)


@pytest.mark.parametrize(
    ("change", "error", "mentions"),
    [
        ({"dtype": "float64"}, UnsupportedModel, "float32, float16, bfloat16"),
        ({"quantization": "fp8"}, UnsupportedModel, "int8"),
    ],
)
def test_options_that_cannot_be_had(change: dict, error: type[LoadError], mentions: str, reference) -> None:
    with pytest.raises(error, match=mentions):
        TorchDevice().load(str(reference("llama").directory), dataclasses.replace(OPTIONS, **change))


def test_learned_positions_end_where_the_table_ends(reference) -> None:
    with pytest.raises(DoesNotFit, match=f"--max-model-len {LONGEST}"):
        TorchDevice().load(str(reference("gpt2").directory), dataclasses.replace(OPTIONS, max_model_len=LONGEST + 1))


def test_facts_of_the_model(reference) -> None:
    facts = TorchDevice().load(str(reference("llama").directory), dataclasses.replace(OPTIONS, dtype="bfloat16"))
    assert (facts.architecture, facts.vocab_size, facts.num_layers) == ("LlamaForCausalLM", 160, 2)
    assert facts.bytes_per_kv_token == 2 * 2 * 2 * 8 * np.float32().itemsize  # k and v, layers, kv heads, head_dim
    assert facts.notes == ("weights are kept in bfloat16, computed in float32",)
