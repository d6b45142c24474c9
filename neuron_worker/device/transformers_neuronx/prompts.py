"""Prompts of a step in the calls the library takes: grouped by bucket, padded on the right.

The library runs each prompt alone, at the bucket of the longest of its call, so only prompts of one bucket share a
call. A prompt of one token is given a second column: at width 1 the library takes it for a decode, which would
overwrite the first position of every other slot. Positions of padding are 0, since the largest is taken for the last
token. Arrays are new in every call, because the library writes to them.

With an EAGLE draft the draft reads a prompt without its first token, and at width 1 the library picks rows as of a
decode, which fails for all slots but the first: then a third column is needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base import Int32
from ..errors import DoesNotFit

Int64 = NDArray[np.int64]
NARROWEST = 2
NARROWEST_WITH_EAGLE = 3


@dataclass(frozen=True)
class Prompt:
    place: int  # output row
    slot: int
    tokens: Int32


class Call(NamedTuple):
    """Arguments of one call; columns as wide as its longest prompt."""

    input_ids: Int64  # [n, t]
    cache_ids: Int64  # [n, t]
    start_ids: Int64  # [n]


def by_bucket(prompts: Sequence[Prompt], buckets: Sequence[int]) -> Iterator[list[Prompt]]:
    groups: dict[int, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(_bucket(len(prompt.tokens), buckets), []).append(prompt)
    for size in sorted(groups):
        yield groups[size]


def _bucket(length: int, buckets: Sequence[int]) -> int:
    index = bisect_left(buckets, length)
    if index == len(buckets):
        raise DoesNotFit(
            f"a prompt of {length} tokens, the largest compiled context bucket is {buckets[-1] if buckets else 0}; "
            "shorten it, or add a bucket to NEURON_CONTEXT_LENGTH_BUCKETS"
        )
    return buckets[index]


def call_of(prompts: Sequence[Prompt], narrowest: int = NARROWEST) -> Call:
    width = max(narrowest, *(len(prompt.tokens) for prompt in prompts))
    input_ids = np.zeros((len(prompts), width), np.int64)
    cache_ids = np.zeros((len(prompts), width), np.int64)
    for row, prompt in enumerate(prompts):
        length = len(prompt.tokens)
        input_ids[row, :length] = prompt.tokens
        cache_ids[row, :length] = np.arange(length)
    return Call(input_ids, cache_ids, np.array([prompt.slot for prompt in prompts], np.int64))
