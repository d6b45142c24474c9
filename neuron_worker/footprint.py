"""What a configuration takes of each core's memory, from config.json alone.

Heads are padded and key and value heads replicated until they divide over the cores; the vocabulary and the MLP are
padded; norms and biases are on every core. Scratch is the largest step's: what one layer hands on in float32, which
each core has whole, and its own share of what the layer computes, of the attention's scores and of the logits.

An estimate to decide by, not the compiler's account: it reuses and tiles as it sees fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from neuronserve.bucketing.memory import MemoryFacts, kv_heads_per_core
from neuronserve.bucketing.plan import Plan

from . import overrides
from .config import NeuronConfig
from .device.base import StepShape
from .device.graph.ops import FloatType
from .device.graph.spec import ITEM_BYTES, ModelSpec, weight_bytes
from .device.transformers_neuronx.settings import stored_bytes

TILED_FROM = 4096
"""Positions. A longer prompt attends in tiles of this many by this many: its scores are never there at once."""

SCORED_AT_ONCE = 64
"""Prompt positions whose logits exist at one time, where a device gives prompt log-probabilities."""

FLOAT = 4

SHARDED_PADDING = 128
"""Positions that the classic library adds to a cache which cores share over the sequence."""


@dataclass(frozen=True)
class DraftShape:
    """What a draft's config.json says of its size."""

    spec: ModelSpec
    head: HeadShape | None = None  # None: it is a model of its own


@dataclass(frozen=True)
class HeadShape:
    """What an EAGLE head has beside its one layer; embeddings and the whole vocabulary are the target's."""

    features: int  # inputs of `fc`: hidden states, and in the first form an embedding
    vocab_size: int  # tokens it drafts from; 0: it has no rows of its own


def memory_facts(config: NeuronConfig, spec: ModelSpec, plan: Plan, draft: DraftShape | None = None) -> MemoryFacts:
    cores, capabilities = config.tensor_parallel_size, config.capabilities
    override = config.overrides if capabilities.on_chip else {}  # others do not look at these fields of it
    prompt_rows = plan.prompts_per_call + (SCORED_AT_ONCE if capabilities.prompt_logprobs else 0)
    return MemoryFacts(
        weight_bytes=weights_of_all_cores(
            spec, cores, float_type(config.dtype), config.quantization, config.quantize_head
        ),
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        kv_bytes=stored_bytes(override) or ITEM_BYTES[float_type(capabilities.cache_dtype or config.dtype)],
        scratch_bytes=max(
            scratch_of_a_core(shape, spec, cores, prompt_rows, scores_prompts=capabilities.on_chip)
            for shape in plan.shapes
        ),
        cores=cores,
        core_counts=capabilities.tensor_parallel_degrees,
        cores_per_line=overrides.cores_per_line(override, spec.num_kv_heads, cores),
        line_padding=SHARDED_PADDING if override.get("shard_over_sequence") else 0,
        draft_weight_bytes=0 if draft is None else draft_weights(draft, config),
        draft_token_bytes=0 if draft is None else draft_token_bytes(draft, config),
    )


def draft_weights(draft: DraftShape, config: NeuronConfig) -> int:
    """On all cores together."""
    spec, head, dtype = draft.spec, draft.head, float_type(config.dtype)
    if head is None:
        cores = config.tensor_parallel_size
        return weights_of_all_cores(spec, cores, dtype, config.quantization, config.quantize_head)
    added = spec.hidden_size * (head.features + head.vocab_size)
    return ITEM_BYTES[dtype] * (spec.num_linear_parameters + added) + FLOAT * spec.num_vector_parameters


def draft_token_bytes(draft: DraftShape, config: NeuronConfig) -> int:
    """Keys and values on one core; for a head also the feature that it goes on from."""
    spec, cores = draft.spec, config.tensor_parallel_size
    item = ITEM_BYTES[float_type(config.capabilities.cache_dtype or config.dtype)]
    heads = kv_heads_per_core(spec.num_heads, spec.num_kv_heads, cores)
    return item * 2 * spec.num_layers * heads * spec.head_dim + (FLOAT * spec.hidden_size if draft.head else 0)


def float_type(dtype: str) -> FloatType:
    if dtype == "float16":
        return "float16"
    return "bfloat16" if dtype == "bfloat16" else "float32"


def padded(spec: ModelSpec, cores: int) -> ModelSpec:
    """The model as it is spread over the cores, replicas among its heads."""
    return replace(
        spec,
        num_heads=_up(spec.num_heads, cores),
        num_kv_heads=kv_heads_per_core(spec.num_heads, spec.num_kv_heads, cores) * cores,
        intermediate_size=_up(spec.intermediate_size, cores),
        vocab_size=_up(spec.vocab_size, cores),
    )


def weights_of_all_cores(
    spec: ModelSpec, cores: int, dtype: FloatType, quantization: str | None = None, quantize_head: bool = False
) -> int:
    """Together: each holds an equal part of the matrices, and all vectors."""
    spread = padded(spec, cores)
    replicas = (cores - 1) * FLOAT * spread.num_vector_parameters
    return weight_bytes(spread, dtype, quantization, quantize_head) + replicas


def scratch_of_a_core(shape: StepShape, spec: ModelSpec, cores: int, prompt_rows: int, *, scores_prompts: bool) -> int:
    """`prompt_rows`: of prompts, that get logits at one time; `scores_prompts`: all scores of a prompt's attention are
    there at once."""
    spread = padded(spec, cores)
    decoded = shape.decode_rows * shape.decode_width
    rows = decoded + min(prompt_rows, shape.prefill_tokens)  # that get logits
    layer = spread.qkv_size + (2 if spec.is_gated else 1) * spread.intermediate_size
    scores = decoded * shape.context
    if scores_prompts:
        scores = max(scores, min(shape.prefill_tokens, TILED_FROM) * min(shape.context, TILED_FROM))
    shared = shape.num_tokens * layer + scores * spread.num_heads + rows * spread.vocab_size
    return FLOAT * (shape.num_tokens * 2 * spec.hidden_size + shared // cores)


def _up(size: int, cores: int) -> int:
    return -(-size // cores) * cores
