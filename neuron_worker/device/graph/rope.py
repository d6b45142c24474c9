"""Rotary positions as a table: the cosines of each position's angles, then their sines.

The frequencies are float32 in the order of operations of the reference implementation: at position 8000 a last bit of a
frequency is a thousandth of a radian.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .spec import RopeSpec


def rope_table(rope: RopeSpec, head_dim: int, num_positions: int) -> NDArray[np.float32]:
    """[num_positions, head_dim]"""
    positions = np.arange(num_positions, dtype=np.float32)
    angles = np.multiply.outer(positions, frequencies(rope, head_dim))  # [positions, head_dim / 2]
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def frequencies(rope: RopeSpec, head_dim: int) -> NDArray[np.float32]:
    """Radians per position of each pair. [head_dim / 2]"""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1.0) / powers
    if rope.scaling == "linear":
        return plain / np.float32(rope.factor)
    if rope.scaling == "llama3":
        return _llama3(rope, plain)
    return plain


def _llama3(rope: RopeSpec, plain: NDArray[np.float32]) -> NDArray[np.float32]:
    """Long wavelengths are stretched by the factor, short ones kept, those between the two interpolated."""
    one = np.float32(1.0)
    wavelengths = one / plain * np.float32(2 * np.pi)
    longest_kept = rope.original_max_positions / rope.high_freq_factor
    shortest_stretched = rope.original_max_positions / rope.low_freq_factor
    factor = np.float32(rope.factor)
    turns = one / wavelengths * np.float32(rope.original_max_positions)
    share = (turns - np.float32(rope.low_freq_factor)) / np.float32(rope.high_freq_factor - rope.low_freq_factor)
    between = (one - share) * plain / factor + share * plain
    scaled = np.where(wavelengths > shortest_stretched, plain / factor, plain)
    is_between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return np.where(is_between, between, scaled).astype(np.float32)
