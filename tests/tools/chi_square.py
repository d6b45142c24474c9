"""Whether counted tokens are likely to have come from a distribution."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]


def chi_square(counts: Counter[int], expected: Float64) -> tuple[float, int]:
    """(statistic, degrees of freedom); what cannot be drawn must not have been."""
    total = sum(counts.values())
    assert all(expected[token] > 0 for token in counts)
    possible = np.flatnonzero(expected)
    statistic = sum((counts[int(t)] - total * expected[t]) ** 2 / (total * expected[t]) for t in possible)
    return float(statistic), len(possible) - 1


def bound(freedom: int) -> float:
    """Above it once in ten thousand (Wilson and Hilferty's cube)."""
    part = 2 / (9 * max(freedom, 1))
    return float(max(freedom, 1) * (1 - part + 3.72 * part**0.5) ** 3)
