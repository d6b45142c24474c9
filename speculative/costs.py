"""What steps with drafts cost beyond plain ones with as many rows.

A step of R rows with d drafts takes `plain + fixed + slope * d / R` seconds, and asking a draft on the device for m of
the rows `fixed + slope * m / R`. On a device that computes a shape whatever it holds the slope is nothing, on one that
skips padding nearly all is slope; both are found by least squares over the steps that were, the latest counting most.
What is plain changes with the length of the texts, so it follows every step, and plain ones at once.

Pure: seconds in, seconds out. Knows no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LATEST_PLAIN = 0.3
"""Weight of a plain step in what is thought of plain ones."""

DRIFT = 0.05
"""And of what a step with drafts took more than was thought: more text, as likely as dearer drafts."""

FIRST = 3
"""Plain steps of which the fastest is taken: the first of a shape finds nothing in the processor's caches."""

PLAIN_TRY = 64
"""Steps with drafts, at most, after which there is a plain one."""

FORGET = 0.98
"""What is left of the steps with drafts that were, with each one that comes."""

ASSUMED = 2.0
"""Steps with and without anything that the line assumed at first counts for, for good."""

SURPRISE = 0.5
"""A step may say at most that it takes by such a part of a plain one more or less than was thought: the machine may
have been busy with something else."""

VERIFIES_ASSUMED = (0.05, 0.25)
ASKS_ASSUMED = (0.05, 0.15)
"""fixed and slope, in plain steps, where no number of rows is known yet."""


class Line:
    """`fixed + slope * x` by least squares with forgetting; what was assumed is never forgotten, so that it has an
    answer even where x was always the same."""

    def __init__(self, fixed: float, slope: float) -> None:
        self._assumed = (fixed, slope)
        # Sums over the steps beyond those assumed, which are at x = 0 and x = 1.
        self._ones = self._x = self._xx = self._y = self._xy = 0.0

    def at(self, x: float) -> float:
        fixed, slope = self.fit()
        return fixed + slope * x

    def add(self, x: float, y: float) -> None:
        self._ones = FORGET * self._ones + 1
        self._x = FORGET * self._x + x
        self._xx = FORGET * self._xx + x * x
        self._y = FORGET * self._y + y
        self._xy = FORGET * self._xy + x * y

    def fit(self) -> tuple[float, float]:
        """fixed and slope, which is never below 0."""
        fixed, slope = self._assumed
        ones, x, xx = self._ones + 2 * ASSUMED, self._x + ASSUMED, self._xx + ASSUMED
        y, xy = self._y + ASSUMED * (2 * fixed + slope), self._xy + ASSUMED * (fixed + slope)
        found = max((ones * xy - x * y) / (ones * xx - x * x), 0.0)
        return (y - found * x) / ones, found


@dataclass
class Lines:
    verifies: Line
    asks: Line

    @classmethod
    def assumed(cls, plain: float) -> Lines:
        return cls(*(Line(plain * fixed, plain * slope) for fixed, slope in (VERIFIES_ASSUMED, ASKS_ASSUMED)))

    def of_rows(self, more: float) -> Lines:
        """For so many times as many rows, of which each costs the same."""
        fits = (self.verifies.fit(), self.asks.fit())
        return Lines(*(Line(fixed, more * slope) for fixed, slope in fits))


@dataclass
class Costs:
    """Of steps with as many rows."""

    rows: int
    lines: Lines | None = None  # None: no step is known, of any number of rows
    plain: float = 0.0  # seconds; before any plain step what it was for nearly as many rows
    num_plain: int = 0
    since_plain: int = 0  # steps with drafts after the latest plain one

    @property
    def is_plain_due(self) -> bool:
        """Whether a plain step should say again what it takes: often at first, as all else is measured by it."""
        return self.num_plain < FIRST or self.since_plain >= min(self.num_plain, PLAIN_TRY)

    def ran_plainly(self, seconds: float) -> None:
        self.num_plain += 1
        self.since_plain = 0
        if self.num_plain <= FIRST:
            self.plain = seconds if self.num_plain == 1 else min(self.plain, seconds)
        else:
            self.plain += LATEST_PLAIN * (min(seconds, (1 + SURPRISE) * self.plain) - self.plain)
        self.lines = self.lines or Lines.assumed(self.plain)

    def ran(self, num_drafts: int, seconds: float) -> None:
        self.since_plain += 1
        if self.lines is not None:
            self.plain += DRIFT * self._learn(self.lines.verifies, num_drafts, seconds - self.plain)

    def asked(self, num_asked: int, seconds: float) -> float:
        """How many seconds more it took than was thought."""
        if self.lines is None:
            return 0.0
        thought = self.lines.asks.at(num_asked / self.rows)
        self._learn(self.lines.asks, num_asked, seconds)
        return max(seconds - thought, 0.0)

    def of_drafts(self, num_asked: int) -> tuple[float, float]:
        """Of a step with drafts, in plain ones: what it takes without them, but asking for them; and each of them."""
        lines = self.lines or Lines.assumed(1.0)
        plain = self.plain or 1.0
        fixed, slope = lines.verifies.fit()
        asking = lines.asks.at(num_asked / self.rows) if num_asked else 0.0
        # Were it less than a plain step, that one was slow by chance.
        return 1 + (max(fixed, 0.0) + max(asking, 0.0)) / plain, slope / self.rows / plain

    def _learn(self, line: Line, count: int, seconds: float) -> float:
        """How much more it was than was thought."""
        thought, most = line.at(count / self.rows), SURPRISE * self.plain
        surprise = min(max(seconds - thought, -most), most)
        line.add(count / self.rows, thought + surprise)
        return surprise


def nearest(known: Mapping[int, Costs], rows: int) -> Costs:
    """For steps of so many rows, which have not been yet: as those of nearly as many."""
    others = [costs for costs in known.values() if costs.lines is not None]
    like = min(others, key=lambda other: abs(other.rows - rows), default=None)
    if like is None or like.lines is None:
        return Costs(rows)
    return Costs(rows, like.lines.of_rows(rows / like.rows), like.plain)
