"""The operations that a graph for the chip may hold, as torch's exporter names them once everything is decomposed.

A graph that needs another one is a change to check on a chip first. None of them reads a value to decide what to
compute, and none has an output whose shape depends on data.
"""

from __future__ import annotations

_ARITHMETIC = "add sub mul div remainder pow rsqrt sigmoid gelu clamp bitwise_and logical_not"
_COMPARISONS = "eq ge gt lt where"
_REDUCTIONS = "amax amin any mean sum _softmax native_layer_norm"
_PRODUCTS = "mm bmm"
_SHAPES = "cat clone expand permute select slice split_with_sizes squeeze unsqueeze view"
_INDEXING = "gather index index_put"
_CONSTANTS = "arange full full_like scalar_tensor"
_TYPES = "_to_copy _assert_tensor_metadata"  # the latter is the exporter's own check of a type

ALLOWED_OPS: frozenset[str] = frozenset(
    " ".join((_ARITHMETIC, _COMPARISONS, _REDUCTIONS, _PRODUCTS, _SHAPES, _INDEXING, _CONSTANTS, _TYPES)).split()
)
"""Names of ATen operations, without overloads."""
