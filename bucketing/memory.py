"""Bytes per core before anything is loaded: weights, KV cache, scratch, and what would fit instead.

Pure arithmetic over facts that others read from config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, gcd

CORE_BYTES = 16 * 2**30
"""Device memory of one NeuronCore-v2 (Inf2, Trn1). A logical core of Trn2 has 24 GiB as the SDK sets it up; the smaller
figure is held against it too."""

LENGTH_STEP = 128


@dataclass(frozen=True)
class MemoryFacts:
    """Filled from the model's config.json and the options."""

    weight_bytes: int  # on all cores together, padding and replicas counted
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    kv_bytes: int = 2  # of one cached number
    scratch_bytes: int = 0  # per core
    cores: int = 1
    core_bytes: int = CORE_BYTES
    core_counts: tuple[int, ...] | None = None  # how many can work as one; None: any number
    cores_per_line: int = 1  # that share the positions of one sequence's keys and values
    line_padding: int = 0  # positions of a sequence's cache beyond its own
    draft_weight_bytes: int = 0  # of a draft beside the model, on all cores together
    draft_token_bytes: int = 0  # what it keeps of one position, on one core


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on each core."""

    weights: int
    kv: int
    scratch: int
    limit: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.scratch

    @property
    def fits(self) -> bool:
        return self.total <= self.limit


def kv_heads_per_core(num_heads: int, num_kv_heads: int, cores: int) -> int:
    """KV heads are replicated until they divide over the cores, never beyond one for each (padded) query head."""
    padded_heads = ceil(num_heads / cores) * cores
    replicated = num_kv_heads * cores // gcd(num_kv_heads, cores)
    return min(replicated, padded_heads) // cores


def kv_bytes_per_token(facts: MemoryFacts) -> int:
    """Keys and values of one position, all layers, on one core, and a draft's part of the block."""
    heads = kv_heads_per_core(facts.num_heads, facts.num_kv_heads, facts.cores)
    return 2 * facts.num_layers * heads * facts.head_dim * facts.kv_bytes + facts.draft_token_bytes


def memory(facts: MemoryFacts, batch: int, length: int) -> MemoryUse:
    """What each core holds when `batch` sequences may all reach `length`."""
    return MemoryUse(
        weights=ceil((facts.weight_bytes + facts.draft_weight_bytes) / facts.cores),
        kv=batch * _positions(facts, length) * kv_bytes_per_token(facts),
        scratch=facts.scratch_bytes,
        limit=facts.core_bytes,
    )


def largest_batch(facts: MemoryFacts, length: int) -> int:
    """Sequences of `length` that fit; 0: not one."""
    return _free_positions(facts) // _positions(facts, length)


def largest_length(facts: MemoryFacts, batch: int) -> int:
    """Longest length at `batch`, a multiple of 128 where there is room for one; 0: none."""
    length = max(_free_positions(facts) // batch * facts.cores_per_line - facts.line_padding, 0)
    return length // LENGTH_STEP * LENGTH_STEP or length


def cores_for_weights(facts: MemoryFacts) -> int:
    """Fewest cores that hold the weights and one token; 0: scratch alone is too much."""
    free = facts.core_bytes - facts.scratch_bytes
    return ceil((facts.weight_bytes + facts.draft_weight_bytes) / free) if free > 0 else 0


def _positions(facts: MemoryFacts, length: int) -> int:
    """Of a sequence of this length, on one core."""
    return ceil((length + facts.line_padding) / facts.cores_per_line)


def _free_positions(facts: MemoryFacts) -> int:
    empty = memory(facts, 0, 0)
    return max(empty.limit - empty.total, 0) // kv_bytes_per_token(facts)
