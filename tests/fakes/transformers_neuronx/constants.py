"""Layouts, sharding choices and sizes, by the library's names."""

import enum
from types import SimpleNamespace

LAYOUT_BSH, LAYOUT_HSB, LAYOUT_SBH = "BSH", "HSB", "SBH"
TILE_SIZE = KV_SHARD_PAD = 128
FUSED_QKV_TP_FACTOR = 3
TRN1_WORLD_SIZE = 32
FpBounds = SimpleNamespace(min=-240.0, max=240.0)


class Layout(enum.Enum):
    """Equal to its own name, an error against anything that is no layout, and unhashable for that."""

    HSB = "HSB"
    BSH = "BSH"
    SBH = "SBH"

    def __eq__(self, other):
        return self is Layout(other)

    __hash__ = None


class GQA(enum.Enum):
    SHARD_OVER_HEADS = "shard-over-heads"
    SHARD_OVER_BATCH = "shard-over-batch"
    REPLICATED_HEADS = "replicated-heads"
    ALL_GATHER_HEADS = "all-gather-heads"
