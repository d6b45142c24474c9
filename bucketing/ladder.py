"""Bucket ladders: the sizes something variable is padded up to. Integers in, sorted integers out.

Knows no shapes, no devices and no requests; `plan` decides which ladder serves what.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from .errors import BadBuckets, DoesNotFit

FINE_STEP = 16
FINE_UNTIL = 128
FINE_RATIO = 1.25


@dataclass(frozen=True)
class Ladder:
    """Sizes in rising order, none twice. `what` is the unit its error speaks of."""

    sizes: tuple[int, ...]
    what: str = "tokens"

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in pairwise(self.sizes))
        if not self.sizes or self.sizes[0] < 1 or not rising:
            raise BadBuckets(f"not a ladder: {self.sizes}; give positive sizes in rising order")

    @property
    def largest(self) -> int:
        return self.sizes[-1]

    def fit(self, length: int) -> int:
        """Smallest size that holds `length`."""
        index = bisect_left(self.sizes, length)
        if index == len(self.sizes):
            raise DoesNotFit(
                f"{length} {self.what}, largest compiled size is {self.largest}; add a bucket or shorten the input"
            )
        return self.sizes[index]

    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(shortest, longest) length that each size serves."""
        lows = (1, *(size + 1 for size in self.sizes[:-1]))
        return tuple(zip(lows, self.sizes, strict=True))


def powers_of_two(limit: int, start: int = 1) -> tuple[int, ...]:
    """start, 2·start, 4·start … below `limit`, then `limit` itself: (1000, 128) -> 128 256 512 1000."""
    sizes = []
    size = start
    while size < limit:
        sizes.append(size)
        size *= 2
    return (*sizes, limit)


def fine(limit: int) -> tuple[int, ...]:
    """Steps of 16 up to 128, then at most 1.25 x apart in multiples of 16, then `limit` itself."""
    sizes = []
    size = FINE_STEP
    while size < limit:
        sizes.append(size)
        size = size + FINE_STEP if size < FINE_UNTIL else int(size * FINE_RATIO) // FINE_STEP * FINE_STEP
    return (*sizes, limit)


def as_given(sizes: Iterable[int], key: str = "buckets") -> tuple[int, ...]:
    """The user's sizes, sorted, repeats dropped."""
    result = tuple(sorted(set(sizes)))
    if not result:
        raise BadBuckets(f"{key} is empty; give sizes such as 128,512,1024 or leave it unset")
    if result[0] < 1:
        raise BadBuckets(f"{key} has {result[0]}; every bucket is a positive integer")
    return result


def parse(text: str, key: str) -> tuple[int, ...] | None:
    """The value of a bucket variable such as "128, 512,,1024". None where it holds nothing but blanks and commas."""
    words = [word.strip() for word in text.split(",")]
    words = [word for word in words if word]
    for word in words:
        if not (word.isascii() and word.isdigit() and int(word) > 0):
            raise BadBuckets(f"{key}={text!r}: {word!r} is not a positive integer; write it as {key}=128,512,1024")
    return as_given(map(int, words), key) if words else None


def thinned(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """`count` of the sizes, spread evenly over the ladder; the last stays."""
    if count >= len(sizes):
        return sizes
    return tuple(sizes[(2 * index * len(sizes) + count) // (2 * count) - 1] for index in range(1, count + 1))
