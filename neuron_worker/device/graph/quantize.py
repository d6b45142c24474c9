"""int8, symmetric: weights with one scale per output channel, activations with one per token and block of inputs.
The rules every executor follows to the bit, all in float32:

    weights      scale = max|w| / 127 over a row; q = clamp(round(w / scale), -128, 127), ties to even
    activations  scale = max|x| / 127 over a block; q = round(x * (127 / max|x|)), ties to even
    product      y = (x . q) * scale; of rounded activations, (sum over blocks, in order, of (q . q) * scale) * scale,
                 where a block's own sum is an integer and exact, and no product is fused with a sum
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def quantize_rows(rows: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 of the same shape, and a scale per row. A row of zeros has scale 1."""
    largest = np.abs(rows).max(axis=1, initial=0.0)
    scales = np.where(largest > 0, largest / np.float32(127), np.float32(1)).astype(np.float32)
    rounded = np.rint(rows / scales[:, None])
    return np.clip(rounded, -128, 127).astype(np.int8), scales


ACTIVATION_BLOCK = 64
_NEXT_TO_ZERO = np.float32(2.0**-100)
"""A block whose largest magnitude is below counts as zeros: 127 divided by it might be infinite."""


def quantize_activations(rows: NDArray[np.float32]) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """int8 of the same shape, and a scale per row and block. The last block of a row may be short."""
    starts = range(0, rows.shape[1], ACTIVATION_BLOCK)
    largest = np.stack([np.abs(rows[:, at : at + ACTIVATION_BLOCK]).max(axis=1) for at in starts], axis=1)
    is_zero = largest < _NEXT_TO_ZERO
    safe = np.where(is_zero, np.float32(127), largest)
    inverses = np.where(is_zero, np.float32(0), np.float32(127) / safe)
    widened = np.repeat(inverses, ACTIVATION_BLOCK, axis=1)[:, : rows.shape[1]]
    with np.errstate(invalid="ignore"):  # the scale of what is no number is none either
        rounded = np.rint(rows * widened).astype(np.int8)
    return rounded, (safe / np.float32(127)).astype(np.float32)
