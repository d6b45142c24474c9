"""What the backend can do, as data, and how to make it. Imports no torch and no SDK."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..base import Capabilities

if TYPE_CHECKING:
    from .device import NeuronTorchDevice

CAPABILITIES = Capabilities(
    name="torch-neuronx",
    on_chip=True,
    kv_layout="blocks",
    mixes_prefill_and_decode=True,
    splits_prompts=True,
    all_live_rows_in_decode=False,
    prompts_per_prefill=4,  # every prompt's context is set against every prompt token of the call
    outputs=("logits", "tokens"),
    sampling="per_step",
    max_top_k=None,  # the chip takes the likeliest; what is drawn at random is drawn on the host beside it
    prompt_logprobs=False,
    drafts=False,
    fused_speculation=False,
    tensor_parallel_degrees=(1,),
    default_max_num_seqs=8,
    default_max_graphs=8,
    fine_prefill_ladder=False,
    cache_dtype="float32",  # whatever the weights are kept in
)


def create(capabilities: Capabilities = CAPABILITIES) -> NeuronTorchDevice:
    from .device import NeuronTorchDevice

    return NeuronTorchDevice(capabilities)
