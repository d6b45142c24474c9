"""Paged attention of the C kernels: against NumPy in float64, and the same bits however a context was computed."""

from __future__ import annotations

import numpy as np
import pytest

from neuronserve.neuron_worker.device.graph.ops import AttentionForm

from .harness import Bench, Piece, every_set, instruction_sets
from .test_linear import bits, numbers

LENGTH = 75
FORMS = {
    "gqa": AttentionForm(6, 2, 64, 0.125),
    "mha": AttentionForm(3, 3, 80, 0.1),
    "mqa": AttentionForm(17, 1, 12, 0.3),
    "large heads": AttentionForm(2, 1, 128, 0.1),
    "window": AttentionForm(6, 2, 64, 0.125, window=20),
    "window of one": AttentionForm(2, 1, 16, 0.25, window=1),
}
BLOCK_SIZES = [1, 5, 8, 16, 24, 37, 80]


def width(form: AttentionForm) -> int:
    return (form.num_heads + 2 * form.num_kv_heads) * form.head_dim


def reference(qkv: np.ndarray, form: AttentionForm) -> np.ndarray:
    heads, kv, dim = form.num_heads, form.num_kv_heads, form.head_dim
    q, k, v = np.split(qkv.astype(np.float64), [heads * dim, (heads + kv) * dim], axis=1)
    q, k, v = q.reshape(-1, heads, dim), k.reshape(-1, kv, dim), v.reshape(-1, kv, dim)
    k, v = (values.repeat(heads // kv, axis=1) for values in (k, v))
    at = np.arange(len(qkv))
    seen = at[:, None] >= at
    if form.window is not None:
        seen &= at[:, None] - at < form.window
    scores = np.where(seen[None], np.einsum("qhd,khd->hqk", q, k) * form.scale, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, v).reshape(len(qkv), -1)


def blocks_for(block_size: int, seed: int) -> list[int]:
    """As many as LENGTH needs, in no order."""
    count = -(-LENGTH // block_size)
    return [int(b) for b in np.random.default_rng(seed).permutation(np.arange(1, count + 1))]


def attend(bench: Bench, form: AttentionForm, pieces: list[Piece]) -> np.ndarray:
    return bench.step(lambda ops, qkv: ops.attend(qkv, 0, form), pieces, context=LENGTH)


def prefill(bench: Bench, form: AttentionForm, qkv: np.ndarray, chunks: list[int], blocks: list[int]) -> np.ndarray:
    results, position = [], 0
    for count in chunks:
        results.append(attend(bench, form, [Piece(qkv[position : position + count], position, blocks)]))
        position += count
    return np.concatenate(results)


def new(bench, isa: str, form: AttentionForm, block_size: int, threads: int = 1) -> Bench:
    made = bench(isa, threads, block_size=block_size)
    made.cache(1 + 2 * -(-LENGTH // block_size), form.num_kv_heads, form.head_dim)
    return made


@every_set
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_against_float64(isa: str, form: str, block_size: int, bench) -> None:
    how, qkv = FORMS[form], numbers(LENGTH, width(FORMS[form]))
    result = prefill(new(bench, isa, how, block_size, 2), how, qkv, [LENGTH], blocks_for(block_size, 1))
    np.testing.assert_allclose(result, reference(qkv, how), atol=2e-5)


@every_set
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("block_size", [5, 8, 16])
def test_chunks_and_single_tokens_give_the_same_bits(isa: str, form: str, block_size: int, bench) -> None:
    how, qkv = FORMS[form], numbers(LENGTH, width(FORMS[form]))
    whole = prefill(new(bench, isa, how, block_size), how, qkv, [LENGTH], blocks_for(block_size, 1))
    for chunks in ([1] * LENGTH, [16, 1, 30, 28], [74, 1]):
        pieces = prefill(new(bench, isa, how, block_size, 3), how, qkv, chunks, blocks_for(block_size, 2))
        assert np.array_equal(bits(pieces), bits(whole)), chunks


@every_set
def test_rows_of_other_sequences_change_no_bit(isa: str, bench) -> None:
    form, block_size = FORMS["gqa"], 8
    first, second = (numbers(LENGTH, width(form), seed=seed) for seed in (1, 2))
    count = -(-LENGTH // block_size)
    alone = prefill(new(bench, isa, form, block_size), form, first, [LENGTH], blocks_for(block_size, 1))
    shared = new(bench, isa, form, block_size, 2)
    mine, others = list(range(1, count + 1)), list(range(count + 1, 2 * count + 1))
    attend(shared, form, [Piece(first[:40], 0, mine), Piece(second[:23], 0, others)])
    mixed = attend(shared, form, [Piece(first[40:43], 40, mine, is_decode=True), Piece(second[23:60], 23, others)])
    decoded = attend(
        shared, form, [Piece(second[60:61], 60, others, is_decode=True), Piece(first[43:44], 43, mine, is_decode=True)]
    )
    assert np.array_equal(bits(mixed[:3]), bits(alone[40:43]))
    assert np.array_equal(bits(decoded[1:]), bits(alone[43:44]))
    np.testing.assert_allclose(decoded[0], reference(second, form)[60], atol=2e-5)


def test_keys_left_by_an_earlier_owner_are_not_seen(bench) -> None:
    form = FORMS["gqa"]
    used = new(bench, "", form, 16)
    prefill(used, form, numbers(LENGTH, width(form), seed=1) * 50, [LENGTH], blocks_for(16, 1))
    qkv = numbers(9, width(form))
    again = attend(used, form, [Piece(qkv, 0, blocks_for(16, 3))])
    fresh = attend(new(bench, "", form, 16), form, [Piece(qkv, 0, blocks_for(16, 3))])
    assert np.array_equal(bits(again), bits(fresh))


@pytest.mark.skipif(len({"avx512", "avx2"} & set(instruction_sets())) < 2, reason="needs both")
@pytest.mark.parametrize("block_size", [5, 8, 16])
def test_avx512_and_avx2_agree_to_the_bit(block_size: int, bench) -> None:
    form, qkv = FORMS["window"], numbers(LENGTH, width(FORMS["window"]))
    wide, narrow = (
        prefill(new(bench, isa, form, block_size), form, qkv, [LENGTH], blocks_for(block_size, 1))
        for isa in ("avx512", "avx2")
    )
    assert np.array_equal(bits(wide), bits(narrow))


def test_copied_blocks_hold_what_the_others_hold(bench) -> None:
    form, qkv = FORMS["gqa"], numbers(LENGTH, width(FORMS["gqa"]))
    made = new(bench, "", form, 16)
    whole = prefill(made, form, qkv, [40, 35], [1, 2, 3, 4, 5])
    made.session.copy_blocks(np.array([[1, 6], [2, 7], [3, 8]], np.int64))
    again = attend(made, form, [Piece(qkv[40:], 40, [6, 7, 8, 9, 10])])
    assert np.array_equal(bits(again), bits(whole[40:]))
