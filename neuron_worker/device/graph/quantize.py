"""int8 weights: symmetric, one scale per output channel. The rule every executor follows to the bit.

scale = max|w| / 127 over a row; q = clamp(round(w / scale), -128, 127), ties to even; y = (x . q) * scale, all float32.
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
