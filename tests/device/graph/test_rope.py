from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from neuronserve.neuron_worker.device.graph.rope import frequencies, rope_table
from neuronserve.neuron_worker.device.graph.spec import RopeSpec


@pytest.mark.parametrize("scaling", ["default", "linear", "llama3"])
@pytest.mark.parametrize("theta", [1e4, 1e5, 5e5, 1e6])
def test_tables_equal_the_references(scaling: str, theta: float) -> None:
    written = {"rope_type": scaling, "rope_theta": theta}
    rope = RopeSpec(theta)
    if scaling == "linear":
        written |= {"factor": 3.0}
        rope = RopeSpec(theta, "linear", 3.0)
    if scaling == "llama3":
        written |= {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        written |= {"original_max_position_embeddings": 2048}
        rope = RopeSpec(theta, "llama3", 8.0, 1.0, 4.0, 2048)
    config = LlamaConfig(hidden_size=256, num_attention_heads=4, max_position_embeddings=8192, rope_parameters=written)
    reference = LlamaRotaryEmbedding(config)
    cosines, sines = reference(torch.zeros(1), torch.arange(8192)[None])

    # Equal to the last bit: at position 8000 a last bit of a frequency is already visible.
    assert (frequencies(rope, 64) == reference.inv_freq.numpy()).all()
    table = rope_table(rope, 64, 8192)
    np.testing.assert_allclose(table[:, :32], cosines[0, :, :32], atol=1e-6)
    np.testing.assert_allclose(table[:, 32:], sines[0, :, :32], atol=1e-6)
