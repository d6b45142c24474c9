"""Bytes per core, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuronserve.bucketing.memory import (
    MemoryFacts,
    cores_for_weights,
    kv_bytes_per_token,
    kv_heads_per_core,
    largest_batch,
    largest_length,
    memory,
)

GIB = 2**30
LLAMA_8B = MemoryFacts(
    weight_bytes=16 * GIB, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, kv_bytes=2, cores=8
)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "cores", "expected"),
    [
        (32, 8, 1, 8),
        (32, 8, 8, 1),
        (32, 8, 32, 1),  # replicated to one for each core
        (9, 3, 1, 3),
        (9, 3, 2, 3),  # 3 twice is 6, 3 on each core
        (9, 3, 32, 1),  # 96 would divide, but there are only 32 padded query heads
        (12, 12, 8, 2),  # no groups: padded with the query heads to 16
        (32, 1, 4, 1),
        (24, 8, 12, 2),  # 8 three times is 24, 2 on each core
    ],
)
def test_kv_heads_are_replicated_until_they_divide(heads: int, kv_heads: int, cores: int, expected: int) -> None:
    assert kv_heads_per_core(heads, kv_heads, cores) == expected


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 32))
def test_no_kv_head_is_lost(kv_heads: int, group: int, cores: int) -> None:
    per_core = kv_heads_per_core(kv_heads * group, kv_heads, cores)
    assert per_core * cores >= kv_heads
    assert per_core <= -(-kv_heads * group // cores)


def test_kv_bytes_of_a_token() -> None:
    # keys and values x 32 layers x 1 head x 128 numbers x 2 bytes
    assert kv_bytes_per_token(LLAMA_8B) == 2 * 32 * 1 * 128 * 2 == 16384


def test_memory_of_each_core() -> None:
    use = memory(replace(LLAMA_8B, scratch_bytes=GIB), batch=4, length=2048)
    assert (use.weights, use.kv, use.scratch) == (2 * GIB, 4 * 2048 * 16384, GIB)
    assert use.total == 3 * GIB + 128 * 2**20
    assert use.fits


def test_what_does_not_fit() -> None:
    # 14 GiB are left on each core: 917504 tokens of 16 KiB.
    assert not memory(LLAMA_8B, batch=16, length=65536).fits
    assert largest_batch(LLAMA_8B, 65536) == 14
    assert largest_length(LLAMA_8B, 16) == 57344
    assert memory(LLAMA_8B, batch=14, length=65536).fits
    assert memory(LLAMA_8B, batch=16, length=57344).fits


def test_a_line_shared_over_the_sequence() -> None:
    # 24 cores share 8 heads, three a head: (65536 + 128) / 3 positions of 16 KiB on each.
    whole = replace(LLAMA_8B, weight_bytes=24 * GIB, cores=24)
    shared = replace(whole, cores_per_line=3, line_padding=128)

    assert memory(whole, batch=12, length=65536).kv == 12 * GIB
    assert memory(shared, batch=12, length=65536).kv == 12 * 21888 * 16384
    # 15 GiB are left on each core: 983040 positions, of three lines each
    assert (largest_batch(whole, 65536), largest_batch(shared, 65536)) == (15, 44)
    assert (largest_length(whole, 12), largest_length(shared, 12)) == (81920, 3 * 81920 - 128)


@given(
    weight=st.integers(0, 40 * GIB),
    scratch=st.integers(0, 20 * GIB),
    cores=st.sampled_from([1, 2, 8]),
    cores_per_line=st.sampled_from([1, 2, 3]),
    batch=st.integers(1, 300),
    length=st.integers(1, 200_000),
)
def test_the_largest_fit_and_one_more_does_not(
    weight: int, scratch: int, cores: int, cores_per_line: int, batch: int, length: int
) -> None:
    padding = 128 if cores_per_line > 1 else 0
    lines = {"cores_per_line": cores_per_line, "line_padding": padding}
    facts = replace(LLAMA_8B, weight_bytes=weight, scratch_bytes=scratch, cores=cores, **lines)
    fewer, shorter = largest_batch(facts, length), largest_length(facts, batch)
    assert fewer == 0 or memory(facts, fewer, length).fits
    assert not memory(facts, fewer + 1, length).fits
    assert shorter == 0 or memory(facts, batch, shorter).fits
    assert not memory(facts, batch, shorter + 128).fits


def test_cores_that_hold_the_weights() -> None:
    facts = replace(LLAMA_8B, weight_bytes=140 * GIB, scratch_bytes=2 * GIB)
    assert cores_for_weights(facts) == 10
    assert cores_for_weights(replace(facts, scratch_bytes=17 * GIB)) == 0
