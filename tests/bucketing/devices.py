"""Capabilities of devices that do not exist, one of each kind the plan tells apart."""

from __future__ import annotations

from dataclasses import replace

from neuronserve.neuron_worker.device.base import Capabilities

CPU = Capabilities(
    name="cpu",
    on_chip=False,
    kv_layout="blocks",
    mixes_prefill_and_decode=True,
    splits_prompts=True,
    all_live_rows_in_decode=False,
    prompts_per_prefill=None,
    outputs=("logits", "tokens"),
    sampling="per_step",
    max_top_k=None,
    prompt_logprobs=True,
    drafts=False,
    fused_speculation=False,
    tensor_parallel_degrees=None,
    default_max_num_seqs=16,
    default_max_graphs=64,
    fine_prefill_ladder=True,
)

SLOT_CHIP = replace(
    CPU,
    name="slot-chip",
    on_chip=True,
    kv_layout="slots",
    mixes_prefill_and_decode=False,
    splits_prompts=False,
    all_live_rows_in_decode=True,
    prompts_per_prefill=1,
    default_max_graphs=8,
    fine_prefill_ladder=False,
)

BLOCK_CHIP = replace(CPU, name="block-chip", on_chip=True, default_max_graphs=8, fine_prefill_ladder=False)

CHUNKING_CHIP = replace(BLOCK_CHIP, name="chunking-chip", mixes_prefill_and_decode=False)

FUSED_CHIP = replace(SLOT_CHIP, name="fused-chip", fused_speculation=True)

ALL = (CPU, SLOT_CHIP, BLOCK_CHIP, CHUNKING_CHIP, FUSED_CHIP)
