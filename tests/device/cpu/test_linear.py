"""Products of the C kernels against NumPy in float64, and each row's independence of the others, to the bit."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from neuronserve.neuron_worker.device.cpu import packer
from neuronserve.neuron_worker.device.graph.quantize import quantize_rows

from .harness import Array, Bench, every_set, instruction_sets, int8_sets, keeps

SIZES = [(576, 96), (37, 45), (1, 1), (130, 33), (64, 257)]
ROW_COUNTS = [1, 2, 3, 7, 12, 13, 31, 130]


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {"gelu": gelu, "gelu_tanh": gelu_tanh}
GATES = {"silu_gate": silu, "gelu_gate": gelu}


def product(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return x.astype(np.float64) @ w.astype(np.float64).T


def linear(bench: Bench, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, **how: object) -> np.ndarray:
    weight = bench.packer.linear([Array(w)], bias, quantize=bool(how.pop("quantize", False)))
    return bench.rows(lambda ops, v: ops.linear(v, weight, **how), x)  # type: ignore[arg-type]


def bits(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint32)


@every_set
@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_float32(isa: str, columns: int, rows: int, bench) -> None:
    w, bias = numbers(rows, columns, seed=1), numbers(rows, seed=2)
    for count in ROW_COUNTS:
        x = numbers(count, columns)
        np.testing.assert_allclose(linear(bench(isa, 2), x, w, bias), product(x, w) + bias, atol=3e-4, rtol=1e-5)


@every_set
@pytest.mark.parametrize("columns", [576, 37])
def test_int8_is_the_product_with_rounded_weights(isa: str, columns: int, bench) -> None:
    w, bias, x = numbers(45, columns, seed=1), numbers(45, seed=2), numbers(29, columns)
    rounded, scales = quantize_rows(w)
    expected = product(x, rounded) * scales + bias
    for count in (1, 5, 29):
        result = linear(bench(isa), x[:count], w, bias, quantize=True)
        np.testing.assert_allclose(result, expected[:count], atol=3e-4, rtol=1e-5)


def test_int8_saturates_at_the_largest_weight_and_takes_a_row_of_zeros(bench) -> None:
    w = np.array([[0.5, -2.0, 1.0], [0.0, 0.0, 0.0]], np.float32)
    result = linear(bench(""), np.eye(3, dtype=np.float32), w, quantize=True)
    step = np.float32(2) / np.float32(127)
    np.testing.assert_allclose(result.T, [[32 * step, -2.0, 64 * step], [0, 0, 0]], rtol=1e-6)


@every_set
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_weights_are_rounded_once_and_computed_in_float32(isa: str, dtype: str, bench) -> None:
    w = numbers(45, 64, seed=1)
    w[0, :6] = [1e-6, 6e-8, 65519.0, -0.0, 1.0009765, 2.0**-14]  # small and large for float16, and ties
    if dtype == "float16":
        narrow = w.astype(np.float16).astype(np.float32)
    else:
        bits_of = w.view(np.uint32)
        narrow = ((bits_of + 0x7FFF + (bits_of >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    for count in (3, 140):
        x = numbers(count, 64)
        result = linear(bench(isa, dtype=dtype), x, w)
        assert np.array_equal(bits(result), bits(linear(bench(isa), x, narrow)))


@every_set
@pytest.mark.parametrize("num_zero_bits", [8, 16])
@pytest.mark.parametrize(("columns", "rows"), SIZES)
@pytest.mark.parametrize("gate", [False, True])
def test_float32_kept_in_fewer_bytes_is_the_same_bits(
    isa: str, num_zero_bits: int, columns: int, rows: int, gate: bool, bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = (bits(numbers(2, rows, columns, seed=1)) >> num_zero_bits << num_zero_bits).view(np.float32)
    parts, activation = ([Array(w[0]), Array(w[1])], "silu_gate") if gate else ([Array(w[0])], None)

    def of(x: np.ndarray) -> tuple[set[str], np.ndarray]:
        one = bench(isa, 2)
        weight = one.packer.linear(parts, gate=gate)
        return one.packer.types, bits(one.rows(lambda ops, v: ops.linear(v, weight, activation=activation), x))

    for count in ROW_COUNTS:
        x = numbers(count, columns)
        kinds, found = of(x)
        kind = "bfloat16" if num_zero_bits == 16 else "float24" if columns % 2 == 0 else "float32"
        assert kinds == {kind if keeps(kind, isa) else "float32"}
        with monkeypatch.context() as changed:
            changed.setattr(packer, "_narrowest", lambda parts: "float32")
            assert np.array_equal(found, of(x)[1]), count


@every_set
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_and_residual(isa: str, activation: str, bench) -> None:
    w, x = numbers(40, 40, seed=1) * 0.2, numbers(14, 40)
    b = bench(isa)
    weight = b.packer.linear([Array(w)])
    result = b.rows(lambda ops, v: ops.linear(v, weight, activation=activation, residual=v), x)
    np.testing.assert_allclose(result, ACTIVATIONS[activation](product(x, w)) + x, atol=1e-5)


@every_set
@pytest.mark.parametrize("activation", GATES)
@pytest.mark.parametrize("quantize", [False, True])
@pytest.mark.parametrize("half", [3, 32, 50])
def test_gate(isa: str, activation: str, quantize: bool, half: int, bench) -> None:
    gate, up, bias, x = numbers(half, 24, seed=1), numbers(half, 24, seed=2), numbers(2 * half, seed=3), numbers(14, 24)
    b = bench(isa, 2)
    weight = b.packer.linear([Array(gate), Array(up)], bias, quantize=quantize, gate=True)
    result = b.rows(lambda ops, v: ops.linear(v, weight, activation=activation), x)
    if quantize:
        (gate, gate_scale), (up, up_scale) = quantize_rows(gate), quantize_rows(up)
        gate, up = gate * gate_scale[:, None], up * up_scale[:, None]
    expected = GATES[activation](product(x, gate) + bias[:half]) * (product(x, up) + bias[half:])
    np.testing.assert_allclose(result, expected, atol=2e-4, rtol=1e-5)


@every_set
@pytest.mark.parametrize(("quantize", "activations"), [(False, "float32"), (True, "float32"), (True, "int8")])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_is_the_same_bits_whatever_stands_beside_it(
    isa: str, quantize: bool, activations: str, threads: int, bench
) -> None:
    w, x = numbers(70, 100, seed=1), numbers(140, 100)
    one = bench(isa, activations=activations)
    alone = np.concatenate([linear(one, x[i : i + 1], w, quantize=quantize) for i in range(len(x))])
    several = bench(isa, threads, activations=activations)
    for count in (*range(2, 41), 140):
        together = linear(several, x[:count], w, quantize=quantize)
        assert np.array_equal(bits(together), bits(alone[:count])), count


FORMS = [
    *((isa, quantize, "float32") for isa in instruction_sets() for quantize in (False, True)),
    *((isa, True, "int8") for isa in int8_sets()),
]


@pytest.mark.parametrize(("isa", "quantize", "activations"), FORMS)
@pytest.mark.parametrize("threads", [1, 3])
def test_more_rows_than_a_cache_holds_are_the_same_bits(
    isa: str, quantize: bool, activations: str, threads: int, bench
) -> None:
    """Of 5,000 rows of 100 the 2 MB that are counted on keep a part alone, so they go in blocks; of panels there are
    enough for the threads."""
    w, x = numbers(400, 100, seed=1), numbers(5000, 100)
    one = bench(isa, activations=activations)
    apart = [linear(one, part, w, quantize=quantize) for part in np.split(x, 40)]
    together = linear(bench(isa, threads, activations=activations), x, w, quantize=quantize)
    assert np.array_equal(bits(together), bits(np.concatenate(apart)))


@pytest.mark.skipif(len({"avx512", "avx2"} & set(instruction_sets())) < 2, reason="needs both")
@pytest.mark.parametrize(("quantize", "activations"), [(False, "float32"), (True, "float32"), (True, "int8")])
def test_avx512_and_avx2_agree_to_the_bit(quantize: bool, activations: str, bench) -> None:
    w, x = numbers(70, 100, seed=1), numbers(40, 100)
    wide, narrow = (
        linear(bench(isa, activations=activations), x, w, quantize=quantize, activation="gelu_tanh")
        for isa in ("avx512", "avx2")
    )
    assert np.array_equal(bits(wide), bits(narrow))


def test_parts_are_stacked_by_rows(bench) -> None:
    parts, x = [numbers(rows, 20, seed=rows) for rows in (33, 5, 70)], numbers(4, 20)
    b = bench("")
    weight = b.packer.linear([Array(part) for part in parts])
    result = b.rows(lambda ops, v: ops.linear(v, weight), x)
    np.testing.assert_allclose(result, product(x, np.concatenate(parts)), atol=1e-4)
