"""What the backend can do, as data, and how to make it. Imports no torch and no SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import Capabilities

if TYPE_CHECKING:
    from .device import NeuronxDevice

CANDIDATES = 256
"""What a sampler on the chip keeps of the vocabulary before anything else."""

CAPABILITIES = Capabilities(
    name="transformers-neuronx",
    on_chip=True,
    kv_layout="slots",
    mixes_prefill_and_decode=False,
    splits_prompts=False,
    all_live_rows_in_decode=True,
    prompts_per_prefill=None,
    outputs=("logits", "tokens"),
    sampling="fixed",
    max_top_k=CANDIDATES,
    prompt_logprobs=False,
    drafts=False,
    fused_speculation=True,
    tensor_parallel_degrees=(1, 2, 4, 8, 12, 24, 32),
    default_max_num_seqs=8,
    default_max_graphs=8,
    fine_prefill_ladder=False,
    quantizations=("int8", "f8e4m3fn"),
    saves_graphs=True,
    more_architectures=("MixtralForCausalLM",),
)


def create(capabilities: Capabilities = CAPABILITIES) -> NeuronxDevice:
    from .device import NeuronxDevice

    return NeuronxDevice(capabilities)
