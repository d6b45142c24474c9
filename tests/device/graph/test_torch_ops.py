"""The reference executor as a graph: traced once for a shape, good for every batch of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from neuronserve.neuron_worker.device.base import DeviceOptions, PackedBatch
from neuronserve.neuron_worker.device.graph.decoder import Model, decode_step, load_model
from neuronserve.neuron_worker.device.graph.torch_batch import tensors_of
from neuronserve.neuron_worker.device.graph.torch_device import TorchDevice
from neuronserve.neuron_worker.device.graph.torch_ops import (
    DecodeTensors,
    KvCache,
    PrefillTensors,
    TorchBatch,
    TorchOps,
    empty_cache,
)
from neuronserve.neuron_worker.device.graph.torch_packer import TorchPacker

from ..driver import Driver, Stream, decode, prefill
from ..models import LONGEST, random_tokens


class Step(torch.nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, decoding: Any, prompts: Any, keys: Any, values: Any) -> torch.Tensor:
        batch = TorchBatch(DecodeTensors(*decoding), PrefillTensors(*prompts), None)
        ops = TorchOps(batch, KvCache(tuple(keys), tuple(values)))
        decode_step(ops, self.model)
        return ops.logits


def inputs(batch: PackedBatch) -> tuple[tuple, tuple]:
    tensors = tensors_of(batch)
    parts = (tensors.decode, tensors.prefill)
    return tuple(tuple(getattr(part, field.name) for field in dataclasses.fields(part)) for part in parts)


def test_one_trace_serves_every_batch_of_its_shape(reference) -> None:
    model = reference("mistral-window")
    options = DeviceOptions(4, LONGEST, 8, 2, threads=1)
    device = TorchDevice()
    device.load(str(model.directory), options)
    driver = Driver(device, block_size=8, num_blocks=40, max_model_len=LONGEST, prompts_per_call=2)
    packed = load_model(model.directory, options, TorchPacker("float32"))
    cache = empty_cache(packed.spec.num_layers, 40, 8, packed.spec.num_kv_heads, packed.spec.head_dim)
    first, second, third = (Stream(random_tokens(30, seed)) for seed in range(3))
    for stream in (first, second, third):
        driver.give_blocks(stream, 20)

    def step(program: Any, *counts: int) -> np.ndarray:
        rows = [decode(first, counts[0]), prefill(second, counts[1]), prefill(third, 2)]
        shape = dataclasses.replace(driver.padded_shape(rows), decode_width=4, prefill_tokens=20)
        batch = driver.pack(rows, shape)
        first.computed += counts[0]
        second.computed += counts[1]
        return program(*inputs(batch), list(cache.keys), list(cache.values)).numpy()

    traced: list[Any] = []

    def trace(*arguments: Any) -> torch.Tensor:
        traced.append(torch.export.export(Step(packed), arguments).module())
        return traced[0](*arguments)

    with torch.no_grad():
        step(trace, 3, 5)
        logits = step(traced[0], 2, 9)  # other lengths, other positions
    np.testing.assert_allclose(logits[:2], model.logits(first.tokens)[3:5], atol=1e-4)
    np.testing.assert_allclose(logits[8], model.logits(second.tokens)[13], atol=1e-4)
