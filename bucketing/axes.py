"""The ladders a plan is made of, and how they shrink until their graphs are few enough.

    decode   decode rows x widths x contexts
    prefill  prefill sizes, each at full context (or at its own size, where a prompt goes whole)
    mixed    two row counts x widths x prefill sizes, at full context

Knows nothing of users' options; `plan` fills it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from neuronserve.neuron_worker.device.base import StepShape

from .ladder import thinned

MIXED_ROWS_APART = 4

# Which ladder gives way first, and how far; the first round keeps a useful choice everywhere, the second is
# for devices that want very few graphs. Contexts first: where lengths are data, a longer context costs least.
GENTLE = (("contexts", 3), ("mixed_prefill", 4), ("mixed_rows", 1), ("prefill", 5), ("decode_rows", 3))
FIRM = (("mixed_prefill", 1), ("prefill", 4), ("contexts", 2), ("decode_rows", 1), ("prefill", 1), ("contexts", 1))


@dataclass(frozen=True)
class Axes:
    contexts: tuple[int, ...]  # of decode shapes
    decode_rows: tuple[int, ...]
    decode_widths: tuple[int, ...]
    prefill: tuple[int, ...]
    mixes: bool
    max_context: int
    whole_prompts: bool  # a prompt is one call, so a prefill part never looks back
    given: frozenset[str] = frozenset()  # ladders the user wrote down: never thinned
    mixed_rows: tuple[int, ...] = field(default=())
    mixed_prefill: tuple[int, ...] = field(default=())

    def __post_init__(self) -> None:
        if self.mixes and not self.mixed_rows:
            object.__setattr__(self, "mixed_rows", _coarse(self.decode_rows))
            object.__setattr__(self, "mixed_prefill", self.prefill)

    @property
    def num_decode(self) -> int:
        return len(self.decode_rows) * len(self.decode_widths) * len(self.contexts)

    @property
    def num_mixed(self) -> int:
        return len(self.mixed_rows) * len(self.decode_widths) * len(self.mixed_prefill)

    @property
    def num_graphs(self) -> int:
        return self.num_decode + len(self.prefill) + self.num_mixed

    def describe(self) -> str:
        return f"{self.num_decode} decode, {len(self.prefill)} prefill, {self.num_mixed} mixed"

    def thinned(self, target: int, limit: int) -> Axes:
        """At most `target` graphs; where the user's own buckets stand in the way, as near as gentle steps come,
        and at most `limit` if that can be had at all."""
        axes = self._thin(GENTLE, target)
        return axes._thin(FIRM, limit if self.given else target)

    def _thin(self, rounds: tuple[tuple[str, int], ...], target: int) -> Axes:
        axes = self
        for name, floor in rounds:
            full: tuple[int, ...] = getattr(axes, name)
            for count in range(len(full) - 1, floor - 1, -1) if name not in self.given else ():
                if axes.num_graphs <= target:
                    return axes
                changes: dict[str, Any] = {name: thinned(full, count)}
                axes = replace(axes, **changes)
        return axes

    def shapes(self) -> tuple[StepShape, ...]:
        top = self.max_context
        decode = {StepShape(r, w, 0, c) for r, w, c in product(self.decode_rows, self.decode_widths, self.contexts)}
        prefill = {StepShape(0, 1, t, t if self.whole_prompts else top) for t in self.prefill}
        mixed = {
            StepShape(r, w, t, top) for r, w, t in product(self.mixed_rows, self.decode_widths, self.mixed_prefill)
        }
        return tuple(sorted(decode | prefill | mixed))


def _coarse(rows: tuple[int, ...]) -> tuple[int, ...]:
    """The largest row count, and one about a quarter of it: a mixed step is mostly its prompt tokens."""
    quarter = next(count for count in rows if count * MIXED_ROWS_APART >= rows[-1])
    return (quarter, rows[-1]) if quarter < rows[-1] else (rows[-1],)
