"""`override_neuron_config`: every field of the classic library's NeuronConfig, typed, checked, and explained.

`read` takes the dictionary as the shell, JSON or Python left it ("True" is a boolean) and returns typed values; an
unknown field or a bad value is one `ConfigError`. `problems` lists the combinations the library itself refuses, given
the model and the rest of the configuration: an error on a chip, a warning elsewhere. `without_effect` names what the
device in use does not look at, `replaced` what a chip looks at in vain. Knows no vLLM, no device and no SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .errors import ConfigError
from .values import Parser, boolean, integer, list_of, near, number, one_of, one_or_list_of, parse, positive, text

KEY = "override_neuron_config"

LAYOUTS = one_of("HSB", "BSH")
DTYPES = one_of("float32", "float16", "bfloat16", aliases={"f32": "float32", "f16": "float16", "bf16": "bfloat16"})
CACHE_DTYPES = one_of("s8", "f16", "bf16", "f8e4m3fn")
AMPS = one_of("f32", "f16", "bf16", aliases={"float32": "f32", "float16": "f16", "bfloat16": "bf16"})


@dataclass(frozen=True)
class Field:
    """One field of NeuronConfig, or of a configuration nested in it (then `fields` instead of `parser`)."""

    name: str
    help: str
    parser: Parser = boolean
    fields: tuple[Field, ...] = ()


_QUANT = (
    Field("quant_dtype", "Type of the stored weights: s8, or f8e4m3fn on a chip.", one_of("s8", "f8e4m3fn")),
    Field("dequant_dtype", "Type they are turned into; must be the model's own.", AMPS),
    Field("quantize_method", "vector_dynamic.", one_of("vector_dynamic", "direct_cast")),
    Field("quantize_attn", "Attention weights too."),
    Field("no_quantize_list", "Layers left alone (f8e4m3fn).", list_of(text)),
)

_KV_CACHE_QUANT = (
    Field("quant_dtype", "Type of the cache.", CACHE_DTYPES),
    Field("dequant_dtype", "Type it is turned into.", CACHE_DTYPES),
    Field("quantize_method", "direct_cast.", one_of("direct_cast")),
)

_CONTINUOUS_BATCHING = (
    Field("max_num_seqs", "Must be --max-num-seqs.", positive),
    Field("batch_size_for_shared_caches", "Another name of max_num_seqs.", positive),
    Field("max_model_len", "Must be --max-model-len.", positive),
    Field("optimized_paged_attention", "The library's experimental paged cache."),
    Field("enable_chunked_prefill", "Needs optimized_paged_attention."),
)

_GENERATION = (
    Field("max_length", "Of the library's own sampling loop.", positive),
    Field("do_sample", "Draw at random."),
    Field("top_k", "No effect: each request has its own.", one_or_list_of(integer)),
    Field("top_p", "No effect: each request has its own.", one_or_list_of(number)),
    Field("top_p_min_tokens", "One number, or one for each of --max-num-seqs.", one_or_list_of(positive)),
    Field("global_top_k", "Candidates kept before anything else.", positive),
    Field("eos_token_id", "Of the library's own sampling loop.", integer),
    Field("temperature", "No effect: each request has its own.", one_or_list_of(number)),
    Field("dynamic", "Sampling parameters may change while serving; on by default."),
    Field("deterministic", "0.5 instead of a random number."),
    Field("per_batch_line", "Each sequence has its own parameters; on by default."),
)


def _whatever(value: object) -> object:
    return value


_SPARSE_ATTN = (
    Field("attn_type", "blk_sparse, window or custom.", one_of("blk_sparse", "window", "custom")),
    Field("causal", "Causal mask."),
    Field("sparse_attn_config", "Parameters of the pattern.", _whatever),
    Field("same_mask_per_layer", "One mask for all layers."),
    Field("sparse_mask_dict", "Masks by layer, for custom.", _whatever),
)

FIELDS = (
    Field("sparse_attn", "Sparse attention (GPT-2, OPT).", fields=_SPARSE_ATTN),
    Field("quant", "Weights stored narrower; quant_dtype s8 is int8.", fields=_QUANT),
    Field("kv_cache_quant", "Cache stored narrower (Llama).", fields=_KV_CACHE_QUANT),
    Field("continuous_batching", "Always on here; its numbers must agree with the flags.", fields=_CONTINUOUS_BATCHING),
    Field("attention_layout", "HSB or BSH.", LAYOUTS),
    Field("collectives_layout", "HSB or BSH.", LAYOUTS),
    Field("cache_layout", "SBH or BSH.", one_of("SBH", "BSH")),
    Field("padding_side", "Serving is right-padded.", one_of("left", "right")),
    Field(
        "group_query_attention",
        "How key and value heads are spread over the cores.",
        one_of("shard-over-heads", "shard-over-batch", "replicated-heads", "all-gather-heads"),
    ),
    Field("sequence_parallel_norm", "Norms sharded over the sequence, in long prompts (Llama)."),
    Field("sequence_parallel_norm_threshold", "Buckets above this are long.", positive),
    Field("bf16_rms_norm", "Norms in bfloat16."),
    Field("on_device_embedding", "The embedding table on the device."),
    Field("on_device_generation", "Sampling on the device.", fields=_GENERATION),
    Field("all_reduce_dtype", "Type of the collectives.", DTYPES),
    Field("cast_logits_dtype", "Type of returned logits.", DTYPES),
    Field("fuse_qkv", "One matrix for queries, keys and values."),
    Field("qkv_tiling", "Needs fuse_qkv."),
    Field("weight_tiling", "MLP weights in tiles of 128 x 128; needs a hidden size that is a multiple of 128."),
    Field("mlp_in_weight_tiling_permute_order", "Order of the tiles' four dimensions.", list_of(integer)),
    Field("mlp_out_weight_tiling_permute_order", "Order of the tiles' four dimensions.", list_of(integer)),
    Field("mlp_out_weight_transpose", "Down projection stored transposed."),
    Field("log_softmax_scores", "Log-probabilities instead of logits (GPT-2)."),
    Field("shard_over_sequence", "The cache sharded along the sequence over cores that share a head (Llama)."),
    Field("duplicate_q_weight_sos", "Queries replicated under shard_over_sequence."),
    Field("output_all_logits", "Logits of every prompt position."),
    Field("attn_output_transposed", "Attention output projection stored transposed."),
    Field("fused_rmsnorm_qkv", "A fused kernel (Llama)."),
    Field("fused_rmsnorm_mlp", "A fused kernel (Llama)."),
    Field("fuse_mlp", "Gate and up in one; needs mlp_out_weight_transpose."),
    Field("is_eagle_target", "Role in EAGLE speculation."),
    Field("is_eagle_draft", "Role in EAGLE speculation."),
    Field("has_pre_attention_norm", "EAGLE drafts have none."),
    Field("compilation_worker_count", "Compiler processes at a time.", positive),
)

DEFAULTS: Mapping[str, Any] = {
    "attention_layout": "BSH",
    "collectives_layout": "BSH",
    "cache_layout": "SBH",
    "fuse_qkv": True,
}
"""What serving sets before the override: it decides whether a combination holds."""

SAMPLER_DEFAULTS: Mapping[str, Any] = {"dynamic": True, "per_batch_line": True}
"""The same of `on_device_generation`, where that is given."""

OF_REQUESTS = ("top_k", "top_p", "temperature")
"""Fields of `on_device_generation` that are written anew for each request."""


@dataclass(frozen=True)
class Surroundings:
    """What a combination is checked against. Filled by `config`."""

    architecture: str
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    cores: int
    max_num_seqs: int
    max_model_len: int
    amp: str  # "f32", "f16" or "bf16"
    context_buckets: tuple[int, ...] = ()
    token_generation_buckets: tuple[int, ...] = ()

    @property
    def is_llama(self) -> bool:
        return self.architecture == "LlamaForCausalLM"


def read(given: object) -> dict[str, Any]:
    """Typed values of the fields that were given; a field given as null is left out."""
    return _read(KEY, given, FIELDS)


def _read(key: str, given: object, fields: Iterable[Field]) -> dict[str, Any]:
    known = {field.name: field for field in fields}
    if not isinstance(given, Mapping):
        example = '{"fuse_qkv": true}'
        raise ConfigError(f"{key}={given!r}: expected an object with named fields, such as {example}")
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{key}.{name}: NeuronConfig has no such field{near(str(name), known)}")
        if value is not None:
            field, path = known[name], f"{key}.{name}"
            values[name] = _read(path, value, field.fields) if field.fields else parse(path, value, field.parser)
    return values


def without_effect(values: Mapping[str, Any], used: frozenset[str]) -> list[str]:
    """Fields that a device which looks only at `used` does not look at; nested ones as 'quant.quantize_attn'."""
    flat = [
        f"{name}.{inner}" if isinstance(value, Mapping) else name
        for name, value in values.items()
        for inner in (value if isinstance(value, Mapping) else ("",))
    ]
    return [name for name in flat if name not in used]


def cores_per_line(values: Mapping[str, Any], num_kv_heads: int, cores: int) -> int:
    """Cores with the same key and value heads, where they share the positions of a sequence."""
    replicates = values.get("group_query_attention") not in ("shard-over-batch", "all-gather-heads")
    return max(1, cores // num_kv_heads) if values.get("shard_over_sequence") and replicates else 1


def replaced(values: Mapping[str, Any]) -> list[str]:
    """One line where the sampler is given what it has of each request."""
    generation = values.get("on_device_generation", {})
    names = [name for name in OF_REQUESTS if name in generation]
    if not names:
        return []
    why = "greedy decoding is compiled in"
    if generation.get("do_sample", True):
        why = "each request has its own; --override-generation-config sets what requests of the OpenAI routes leave out"
    return [f"{KEY}.on_device_generation: no effect of {', '.join(names)}: {why}"]


def problems(values: Mapping[str, Any], around: Surroundings) -> list[str]:
    """Combinations the library refuses, each with its remedy."""
    merged = {**DEFAULTS, **values}
    return [problem for check in _CHECKS for problem in check(merged, around)]


def _fusions(values: Mapping[str, Any], around: Surroundings) -> Iterator[str]:
    if values.get("qkv_tiling") and not values.get("fuse_qkv"):
        yield "qkv_tiling needs fuse_qkv: leave fuse_qkv out or set it to true"
    if values.get("fuse_mlp") and not values.get("mlp_out_weight_transpose"):
        yield "fuse_mlp needs mlp_out_weight_transpose: set it to true"
    for name in ("fused_rmsnorm_qkv", "fused_rmsnorm_mlp"):
        if values.get(name) and not _can_fuse_norm(name, values):
            yield (
                f"{name} would be turned off: it needs attention_layout BSH, group_query_attention replicated-heads"
                + (", fuse_qkv, and no sequence_parallel_norm" if name.endswith("qkv") else "")
            )


def _can_fuse_norm(name: str, values: Mapping[str, Any]) -> bool:
    layout = values["attention_layout"] == "BSH" and values.get("group_query_attention") == "replicated-heads"
    if name == "fused_rmsnorm_mlp":
        return layout
    return layout and bool(values.get("fuse_qkv")) and not values.get("sequence_parallel_norm")


def _weight_tiling(values: Mapping[str, Any], around: Surroundings) -> Iterator[str]:
    if values.get("weight_tiling") and around.hidden_size % 128:
        yield f"weight_tiling needs a hidden size that is a multiple of 128, the model's is {around.hidden_size}"
    for name in ("mlp_in_weight_tiling_permute_order", "mlp_out_weight_tiling_permute_order"):
        order = values.get(name)
        if order is not None and (sorted(order) != [0, 1, 2, 3] or order.index(2) > order.index(3)):
            yield f"{name}={order}: give the numbers 0 to 3 once each, 2 before 3, such as [1, 2, 0, 3]"


def _sequence_sharding(values: Mapping[str, Any], around: Surroundings) -> Iterator[str]:
    if not values.get("shard_over_sequence"):
        return
    if not around.is_llama:
        yield f"shard_over_sequence is for LlamaForCausalLM, this is {around.architecture}: leave it out"
    shared = cores_per_line(values, around.num_kv_heads, around.cores)
    if around.num_heads == around.num_kv_heads:
        yield "shard_over_sequence would be turned off: every head has a key and value head of its own"
    elif around.cores % around.num_kv_heads:
        yield (
            f"shard_over_sequence needs --tensor-parallel-size to be a multiple of the {around.num_kv_heads} "
            f"key and value heads, it is {around.cores}"
        )
    elif around.cores == around.num_kv_heads:
        yield (
            f"shard_over_sequence needs cores that share a head: {around.cores} cores (--tensor-parallel-size) and "
            f"{around.num_kv_heads} key and value heads leave each core its own; leave it out, or give more cores"
        )
    elif uneven := [size for size in around.context_buckets if size % shared]:
        # Of a prompt that long the library's cores would drop the last positions, too few for a turn of each.
        yield (
            f"shard_over_sequence needs context buckets to be multiples of {shared}, the cores of each head, "
            f"{', '.join(map(str, uneven))} are not: set NEURON_CONTEXT_LENGTH_BUCKETS to such"
        )
    if values["cache_layout"] == "BSH":
        yield "shard_over_sequence needs cache_layout SBH"
    if values.get("sparse_attn"):
        yield "shard_over_sequence and sparse_attn exclude each other: leave one out"


def _sparse_attention(values: Mapping[str, Any], around: Surroundings) -> Iterator[str]:
    if values.get("sparse_attn") and not around.architecture.startswith(("GPT2", "OPT")):
        yield f"sparse_attn is for GPT-2 and OPT, this is {around.architecture}: leave it out"


def _stored_cache(values: Mapping[str, Any], around: Surroundings) -> Iterator[str]:
    # The library's other models write the cache narrower and read it as it lies (their attention in December 2024).
    if "kv_cache_quant" in values and not around.is_llama:
        yield f"kv_cache_quant is for LlamaForCausalLM, this is {around.architecture}: leave it out"


def _layouts(values: Mapping[str, Any], around: Surroundings) -> Iterator[str]:
    if values["cache_layout"] == "BSH":
        if max(len(around.context_buckets), len(around.token_generation_buckets)) > 1:
            yield "cache_layout BSH takes one context bucket and one token-generation bucket"
        if values.get("group_query_attention") == "shard-over-batch":
            yield "cache_layout BSH and group_query_attention shard-over-batch exclude each other"
    if values.get("group_query_attention") == "shard-over-batch" and around.max_num_seqs % around.cores:
        yield (
            f"group_query_attention shard-over-batch needs --max-num-seqs ({around.max_num_seqs}) to be a multiple "
            f"of --tensor-parallel-size ({around.cores})"
        )
    if values.get("padding_side") == "left":
        yield "padding_side left is for static batches: continuous batching pads on the right"


def _sequence_parallel_norm(values: Mapping[str, Any], around: Surroundings) -> Iterator[str]:
    if not values.get("sequence_parallel_norm"):
        return
    threshold = values.get("sequence_parallel_norm_threshold", 2048)
    uneven = [size for size in around.context_buckets if size > threshold and size % around.cores]
    if uneven:
        yield (
            f"sequence_parallel_norm needs context buckets above {threshold} to be multiples of "
            f"--tensor-parallel-size ({around.cores}), {', '.join(map(str, uneven))} are not: set "
            "NEURON_CONTEXT_LENGTH_BUCKETS to such, or raise sequence_parallel_norm_threshold"
        )


def _batching(values: Mapping[str, Any], around: Surroundings) -> Iterator[str]:
    batching = values.get("continuous_batching")
    if batching is None:
        return
    for name, flag, wanted in (
        ("max_num_seqs", "--max-num-seqs", around.max_num_seqs),
        ("batch_size_for_shared_caches", "--max-num-seqs", around.max_num_seqs),
        ("max_model_len", "--max-model-len", around.max_model_len),
    ):
        if batching.get(name, wanted) != wanted:
            yield f"continuous_batching.{name}={batching[name]} must be {flag} ({wanted}): leave it out"
    if not {"max_num_seqs", "batch_size_for_shared_caches"} & set(batching):
        yield f"continuous_batching needs max_num_seqs: set it to --max-num-seqs ({around.max_num_seqs})"
    if batching.get("enable_chunked_prefill") and not batching.get("optimized_paged_attention"):
        yield "continuous_batching.enable_chunked_prefill needs optimized_paged_attention"


def _generation(values: Mapping[str, Any], around: Surroundings) -> Iterator[str]:
    if "on_device_generation" not in values:
        return
    generation = {**SAMPLER_DEFAULTS, **values["on_device_generation"]}
    lists = {name: value for name, value in generation.items() if isinstance(value, list)}
    if lists and not generation.get("per_batch_line"):
        yield f"on_device_generation: {', '.join(lists)} may be lists only with per_batch_line"
    short = [name for name, value in lists.items() if len(value) != around.max_num_seqs]
    if short:
        yield f"on_device_generation: {', '.join(short)} need one value for each of {around.max_num_seqs} sequences"
    if "global_top_k" in generation and not generation.get("dynamic"):
        yield "on_device_generation.global_top_k needs dynamic"


def _quantization(values: Mapping[str, Any], around: Surroundings) -> Iterator[str]:
    quant = values.get("quant")
    if quant is None:
        return
    if quant.get("quantize_method") == "direct_cast":
        yield "quant.quantize_method direct_cast fails in the library: leave it out"
    if quant.get("dequant_dtype", around.amp) != around.amp:
        yield f"quant.dequant_dtype={quant['dequant_dtype']} must be the model's type ({around.amp}): leave it out"


def _eagle(values: Mapping[str, Any], around: Surroundings) -> Iterator[str]:
    if values.get("is_eagle_target") and values.get("is_eagle_draft"):
        yield "is_eagle_target and is_eagle_draft exclude each other: leave one out"


_CHECKS: tuple[Callable[[Mapping[str, Any], Surroundings], Iterator[str]], ...] = (
    _fusions,
    _weight_tiling,
    _sequence_sharding,
    _sparse_attention,
    _stored_cache,
    _layouts,
    _sequence_parallel_norm,
    _batching,
    _generation,
    _quantization,
    _eagle,
)
