"""The checks of `neuronserve verify`, on the stand-in library."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from neuronserve.neuron_worker.config import ServeRequest
from neuronserve.neuron_worker.device.transformers_neuronx.device import NeuronxDevice
from neuronserve.neuron_worker.machine import Machine
from neuronserve.neuron_worker.resolve import resolve
from neuronserve.neuron_worker.verify import GROUPS, run_groups


def test_contract_and_exactness(library: ModuleType, model_dir: Callable[..., str]) -> None:
    model = model_dir(vocab_size=100, max_position_embeddings=128)
    request = ServeRequest(model, max_model_len=128, max_num_seqs=4, options={"backend": "transformers-neuronx"})
    config = resolve(request, {}, Machine()).config

    lines = list(run_groups(config, model, lambda: NeuronxDevice(environ={}), GROUPS))

    assert not [line for line in lines if line.failed]
    assert [line.what for line in lines if line.result == "pass"].count("joined late, in a full batch") == 1
