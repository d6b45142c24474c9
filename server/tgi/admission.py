"""How many generations are let in at once. Tried, never awaited: who finds no place is told at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .errors import Overloaded


class Admission:
    """Of one API process. Not for threads: all requests live in one event loop."""

    def __init__(self, places: int) -> None:
        self._free = places

    @property
    def num_free(self) -> int:
        return self._free

    @contextmanager
    def admit(self, num_answers: int) -> Iterator[None]:
        """One place for each answer, held until the request has been answered or its client has left."""
        if num_answers > self._free:
            raise Overloaded
        self._free -= num_answers
        try:
            yield
        finally:
            self._free += num_answers


def share(places: int, num_processes: int) -> int:
    """Of one process among several: they cannot count together, so each gets its part, and none gets none."""
    return max(1, places // num_processes)
