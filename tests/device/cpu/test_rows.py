"""Look-up, norms and rope of the C kernels against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

from neuronserve.neuron_worker.device.graph.ops import AttentionForm

from .harness import Array, every_set, instruction_sets
from .test_linear import bits, numbers

WIDTHS = [1, 7, 16, 33, 64, 576]


def rms(x: np.ndarray, weight: np.ndarray, epsilon: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + epsilon) * weight


@every_set
@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(isa: str, width: int, bench) -> None:
    x, weight, b = numbers(5, width), numbers(width, seed=1), bench(isa)
    norm = b.packer.norm("rms", 1e-5, weight)
    np.testing.assert_allclose(b.rows(lambda ops, v: ops.norm(v, norm), x), rms(x, weight, 1e-5), rtol=1e-5, atol=1e-6)


@every_set
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(isa: str, width: int, bench) -> None:
    x, weight, bias, b = numbers(5, width) + 3, numbers(width, seed=1), numbers(width, seed=2), bench(isa)
    norm = b.packer.norm("layer", 1e-5, weight, bias)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=1, keepdims=True) + 1e-5) * weight + bias
    np.testing.assert_allclose(b.rows(lambda ops, v: ops.norm(v, norm), x), expected, atol=2e-5)


@pytest.mark.skipif(len({"avx512", "avx2"} & set(instruction_sets())) < 2, reason="needs both")
def test_norms_agree_to_the_bit(bench) -> None:
    x, weight = numbers(5, 77), numbers(77, seed=1)
    results = []
    for isa in ("avx512", "avx2"):
        b = bench(isa)
        norm = b.packer.norm("rms", 1e-5, weight)
        results.append(b.rows(lambda ops, v, norm=norm: ops.norm(v, norm), x))
    assert np.array_equal(bits(results[0]), bits(results[1]))


@every_set
@pytest.mark.parametrize("head_dim", [16, 12, 80])
def test_head_norm_and_rope(isa: str, head_dim: int, bench) -> None:
    form = AttentionForm(3, 1, head_dim, 1.0)
    x, b = numbers(6, 5 * head_dim), bench(isa)
    query, key = numbers(head_dim, seed=1), numbers(head_dim, seed=2)
    angles = np.outer(np.arange(16), 1.0 / 100 ** np.linspace(0, 1, head_dim // 2))
    table = b.packer.rope_table(np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32))
    norms = b.packer.norm("rms", 1e-6, query), b.packer.norm("rms", 1e-6, key)
    b.cache(2, 1, head_dim)

    def graph(ops, v):
        v = ops.rope(ops.head_norm(v, form, *norms), form, table)
        ops.attend(v, 0, form)
        return v

    result = b.rows(graph, x).reshape(6, 5, head_dim)
    heads = x.reshape(6, 5, head_dim)
    normed = np.concatenate([rms(heads[:, :3], query, 1e-6), rms(heads[:, 3:4], key, 1e-6)], axis=1)
    low, high = np.split(normed, 2, axis=-1)
    cosine, sine = np.cos(angles[:6])[:, None], np.sin(angles[:6])[:, None]
    turned = np.concatenate([low * cosine - high * sine, high * cosine + low * sine], axis=-1)
    np.testing.assert_allclose(result, np.concatenate([turned, heads[:, 4:]], axis=1), atol=1e-5)


@every_set
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_positions_are_added_to_the_look_up(isa: str, dtype: str, bench) -> None:
    b = bench(isa, dtype=dtype)
    x, positions = np.round(numbers(5, 20) * 4) / 4, np.round(numbers(16, 20, seed=1) * 4) / 4
    table, learned = b.packer.table(Array(x)), b.packer.table(Array(positions))
    result = b.rows(lambda ops, v: ops.embed(table, learned), x)
    assert np.array_equal(result, x + positions[:5])
