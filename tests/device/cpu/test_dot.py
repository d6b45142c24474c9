"""Products of int8 with int8: the rule in float64 and whole numbers, to the bit, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neuronserve.neuron_worker.device.errors import DeviceError
from neuronserve.neuron_worker.device.graph.ops import NormWeight
from neuronserve.neuron_worker.device.graph.torch_ops import TorchOps
from neuronserve.neuron_worker.device.graph.torch_packer import TorchPacker

from .harness import Array, Bench, every_int8_set
from .test_linear import bits, numbers, silu

SIZES = [(576, 96), (1536, 40), (37, 45), (1, 1), (130, 33), (64, 257)]
ROW_COUNTS = [1, 2, 3, 5, 6, 7, 8, 9, 17, 130]


def rounded(values: np.ndarray, axis_length: int) -> tuple[np.ndarray, np.ndarray]:
    """(whole numbers, float32 scale of each) of rows cut in blocks of `axis_length`."""
    whole, scales = np.zeros(values.shape), np.ones_like(values)
    for start in range(0, values.shape[1], axis_length):
        block = values[:, start : start + axis_length]
        largest = np.abs(block).max(axis=1, keepdims=True)
        filled = largest[:, 0] > 0
        scales[filled, start : start + axis_length] = largest[filled] / np.float32(127)
        inverse = np.float32(127) / largest[filled]
        whole[filled, start : start + axis_length] = np.rint(block[filled] * inverse)
    return whole, scales


def weights_of(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scale = np.abs(w).max(axis=1) / np.float32(127)
    scale[scale == 0] = 1
    return np.rint(w / scale[:, None]).astype(np.float64), scale


def rule(x: np.ndarray, w: np.ndarray, bias: np.ndarray | float = 0.0) -> np.ndarray:
    """Blocks of 64 in order; a block's sum is exact, and each step after it is rounded to float32 once."""
    (whole, scales), (channels, channel_scales) = rounded(x, 64), weights_of(w)
    sums = np.zeros((len(x), len(w)), np.float32)
    for start in range(0, x.shape[1], 64):
        exact = whole[:, start : start + 64] @ channels[:, start : start + 64].T
        sums = sums + exact.astype(np.float32) * scales[:, start : start + 1]
    return sums * channel_scales + np.float32(bias)


def product(b: Bench, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
    weight = b.packer.linear([Array(w)], bias, quantize=True)
    return b.rows(lambda ops, v: ops.linear(v, weight), x)


@every_int8_set
@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_the_rule_to_the_bit(isa: str, columns: int, rows: int, bench) -> None:
    w, bias, b = numbers(rows, columns, seed=1), numbers(rows, seed=2), bench(isa, 2, activations="int8")
    for count in ROW_COUNTS:
        x = numbers(count, columns) * np.exp2(numbers(count, 1, seed=3) * 9)  # rows of very different size
        assert np.array_equal(bits(product(b, x, w, bias)), bits(rule(x, w, bias)))


@every_int8_set
def test_the_largest_numbers_do_not_saturate(isa: str, bench) -> None:
    signs = np.sign(numbers(70, 256, seed=1))
    x, w = np.concatenate([signs, np.ones((2, 256), np.float32)]), np.concatenate([signs, np.ones_like(signs)])
    exact = x.astype(np.float64) @ w.T
    np.testing.assert_allclose(product(bench(isa, activations="int8"), x, w), exact, atol=1e-4)


@every_int8_set
def test_zeros_numbers_next_to_zero_and_no_numbers(isa: str, bench) -> None:
    x, w = numbers(5, 130), numbers(40, 130, seed=1)
    x[0], x[1, :64], x[2] = 0.0, 0.0, 1e-40
    x[3, 70], x[4, 3] = np.nan, np.inf
    result = product(bench(isa, activations="int8"), x, w)
    assert (result[[0, 2]] == 0).all()
    assert np.array_equal(bits(result[1:2]), bits(rule(x[1:2], w)))
    assert not np.isfinite(result[3:]).any()


@every_int8_set
def test_the_float_product_is_near(isa: str, bench) -> None:
    x, w = numbers(9, 576), numbers(64, 576, seed=1)
    exact = x.astype(np.float64) @ w.T
    error = product(bench(isa, activations="int8"), x, w) - exact
    assert np.sqrt((error**2).mean() / (exact**2).mean()) < 0.012  # 1/127 of the largest of 64, twice, mostly less


@every_int8_set
@pytest.mark.parametrize("half", [3, 32, 50])
def test_gate_and_residual(isa: str, half: int, bench) -> None:
    gate, up, bias, x = numbers(half, 24, seed=1), numbers(half, 24, seed=2), numbers(2 * half, seed=3), numbers(14, 24)
    down = numbers(24, half, seed=4)
    b = bench(isa, 2, activations="int8")
    both = b.packer.linear([Array(gate), Array(up)], bias, quantize=True, gate=True)
    back = b.packer.linear([Array(down)], quantize=True)
    gated = b.rows(lambda ops, v: ops.linear(v, both, activation="silu_gate"), x)
    result = b.rows(lambda ops, v: ops.linear(ops.linear(v, both, activation="silu_gate"), back, residual=v), x)
    expected = silu(rule(x, gate, bias[:half]).astype(np.float64)) * rule(x, up, bias[half:])
    np.testing.assert_allclose(gated, expected, rtol=1e-5, atol=1e-6)
    assert np.array_equal(bits(result), bits(rule(gated, down) + x))


@every_int8_set
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_norm_before_is_rounded_as_it_is(isa: str, kind: str, bench) -> None:
    x, w, b = numbers(7, 150), numbers(40, 150, seed=1), bench(isa, activations="int8")
    norm = NormWeight(kind, 1e-5, numbers(150, seed=2), numbers(150, seed=3) if kind == "layer" else None)
    weight = b.packer.linear([Array(w)], quantize=True)
    result = b.rows(lambda ops, v: ops.linear(ops.norm(v, norm), weight), x)
    assert np.array_equal(bits(result), bits(rule(b.rows(lambda ops, v: ops.norm(v, norm), x), w)))


def test_a_norm_that_was_taken_in_has_no_second_reader(bench) -> None:
    b = bench("", activations="int8")
    norm = NormWeight("rms", 1e-5, numbers(24, seed=2))
    weight = b.packer.linear([Array(numbers(24, 24))], quantize=True)

    def twice(ops, v):
        normed = ops.norm(v, norm)
        return ops.linear(normed, weight, residual=normed)

    with pytest.raises(DeviceError, match="one reader"):
        b.rows(twice, numbers(3, 24))


@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_torch_gives_the_same_bits(columns: int, rows: int) -> None:
    x, w, bias = numbers(19, columns), numbers(rows, columns, seed=1), numbers(rows, seed=2)
    x[0, :50] = 0
    weight = TorchPacker("float32", "int8").linear([Array(w)], bias, quantize=True)
    result = TorchOps.linear(None, torch.from_numpy(x), weight).numpy()  # type: ignore[arg-type]
    assert np.array_equal(bits(result), bits(rule(x, w, bias)))
