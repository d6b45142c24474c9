"""What the embedded device can do, with kernels or on torch. Imports neither."""

from __future__ import annotations

from ..base import Capabilities

CAPABILITIES = Capabilities(
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
    drafts=True,
    fused_speculation=False,
    tensor_parallel_degrees=None,
    default_max_num_seqs=32,
    default_max_graphs=64,
    fine_prefill_ladder=True,
    cache_dtype="float32",
    rounds_activations=True,
)
