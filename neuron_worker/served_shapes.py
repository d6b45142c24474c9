"""The sizes of what is served: how long a sequence is, what a block holds, how prompts are cut."""

from __future__ import annotations

from neuronserve.bucketing.plan import CHUNK_TOKENS, FINE_CHUNK_TOKENS, TOKEN_GENERATION_KEY

from .device.base import Capabilities
from .environment import Environment
from .errors import ConfigError
from .given import Given

BLOCK_SIZE = 16

OVERRIDDEN = "transformers-neuronx"
"""Whose NeuronConfig it is that the override changes."""


def length(given: Given) -> int:
    asked, spec = given.request.max_model_len, given.spec
    if asked is None or asked <= spec.longest:
        return asked or spec.longest
    problem = f"--max-model-len {asked}: {spec.architecture} here has positions for {spec.longest} tokens"
    if spec.rope is None:
        raise ConfigError(f"{problem}, a learned table; use --max-model-len {spec.longest} or less")
    given.warnings.append(f"{problem}; vLLM serves beyond them only with VLLM_ALLOW_LONG_MAX_MODEL_LEN=1")
    return asked


def block_size(given: Given, length: int) -> int:
    asked, capabilities = given.request.block_size, given.capabilities
    if capabilities.kv_layout == "slots":
        if asked not in (None, length):
            given.notes.append(
                f"--block-size {asked}: blocks are whole slots of {length} tokens on the {capabilities.name} device"
            )
        return length
    if asked is None:
        return min(BLOCK_SIZE, length)
    if length % asked == 0:
        return asked
    divisor = max(size for size in range(1, min(asked, length) + 1) if length % size == 0)
    rounded = f" --max-model-len {length // asked * asked}," if asked < length else ""
    raise ConfigError(
        f"--block-size {asked} does not divide --max-model-len {length}: use{rounded} --block-size {divisor}, "
        f"or --block-size {length} for one block per sequence"
    )


def chunks(given: Given, length: int) -> tuple[int | None, bool]:
    """(tokens of a chunk that were asked for, whether prompts may be split)."""
    request, capabilities, notes = given.request, given.capabilities, given.notes
    chunk, budget = given.number("chunk_tokens"), request.max_num_batched_tokens
    if not capabilities.splits_prompts:
        flags = {"--max-num-batched-tokens": budget, "--enable-chunked-prefill": request.enable_chunked_prefill}
        notes += [
            f"{flag} has no effect: the {capabilities.name} device takes prompts whole"
            for flag, value in flags.items()
            if value
        ]
        return chunk, False
    if request.enable_chunked_prefill is False and not _has_narrow_buckets(given, length):
        if chunk is not None:
            notes.append(f"chunk_tokens={chunk} has no effect with --no-enable-chunked-prefill")
        return length, False
    if budget is None:
        return chunk, True
    chunk = chunk or _default_chunk(capabilities, given.env)
    if budget > chunk + (request.max_num_seqs or capabilities.default_max_num_seqs):
        notes.append(
            f"--max-num-batched-tokens {budget}: a step holds every decode row and at most {chunk} prompt tokens; "
            f"--neuronserve.chunk_tokens {budget} raises that"
        )
    return min(budget, chunk), True


def _has_narrow_buckets(given: Given, length: int) -> bool:
    buckets = given.env.context_buckets
    if not buckets or buckets[-1] >= length:
        return False
    given.warnings.append(
        f"--no-enable-chunked-prefill: prompts above {buckets[-1]} tokens, the largest context bucket, still go in "
        "chunks"
    )
    return True


def _default_chunk(capabilities: Capabilities, env: Environment) -> int:
    if env.context_buckets:
        return env.context_buckets[-1]
    return FINE_CHUNK_TOKENS if capabilities.fine_prefill_ladder else CHUNK_TOKENS


def token_generation_buckets(given: Given, length: int) -> tuple[int, ...] | None:
    """Where cores share the positions of a sequence, a cache line has one length in all graphs: the longest."""
    asked = given.env.token_generation_buckets
    if given.backend != OVERRIDDEN or not given.override.get("shard_over_sequence"):
        return asked
    if unused := [size for size in asked or () if size != length]:
        given.notes.append(
            f"{TOKEN_GENERATION_KEY}: {', '.join(map(str, unused))} not used with shard_over_sequence: every decode is "
            f"at --max-model-len {length}"
        )
    return (length,)


def prefix_caching(given: Given, one_block: bool) -> bool:
    asked, capabilities = given.request.enable_prefix_caching, given.capabilities
    if asked is False:
        return False
    if one_block or capabilities.kv_layout == "slots" or not capabilities.splits_prompts:
        if asked:
            why = "a block is a whole sequence" if one_block else f"the {capabilities.name} device takes prompts whole"
            given.notes.append(f"--enable-prefix-caching has no effect: {why}; choose a smaller --block-size")
        return False
    return True
