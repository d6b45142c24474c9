"""Whether drafts are worth their verification in the next step, from what steps have cost and what was kept.

A step has one shape: with drafts every row of it is computed k+1 wide, so it is drafted for all rows or for none, and
depth is k or 0. A step of B rows without drafts gives B tokens in `plain` seconds; with drafts B and the accepted ones
in `verify` seconds, the draft's own among them. So drafts pay where

    (B + expected accepted) / verify  >  B / plain

Both costs are moving averages over the steps that were, by number of rows as compiled. What a row may expect is its own
average, which starts at that of the requests before it. What is not known must be tried; each try that loses time is
paid from a small share of all time, so that no traffic is slower than plain decoding by more than about that share.

Pure: numbers in, a decision out. Knows no clock, no requests and no proposer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SHARE = 0.015
"""Of all time, may be lost in tries."""

RECENT = 0.1
"""Weight of the latest step in an average of costs."""

LATEST = 0.2
"""Weight of a row's latest drafts in what it keeps of them."""

MEMORY = 400
"""Steps after which what they gained or lost is half forgotten."""

FIRST_TRIES = 3
"""Steps of each kind before their cost is believed: the first of a shape finds nothing in the processor's caches."""

PLAIN_TRY = 100
"""Steps with drafts after which one without them says again what it costs."""


@dataclass
class Cost:
    """Seconds of steps of one kind."""

    seconds: float = 0.0
    num_steps: int = 0

    @property
    def is_known(self) -> bool:
        return self.num_steps >= FIRST_TRIES

    def add(self, seconds: float) -> None:
        self.num_steps += 1
        if self.num_steps <= FIRST_TRIES:
            self.seconds = seconds if self.num_steps == 1 else min(self.seconds, seconds)
        else:
            self.seconds += RECENT * (seconds - self.seconds)


@dataclass
class Kept:
    """What a request keeps of its drafts: a share of those that it had."""

    share: float

    def add(self, drafted: int, kept: int) -> None:
        self.share += LATEST * (kept / drafted - self.share)


@dataclass
class Costs:
    """Of steps with as many rows."""

    plain: Cost = field(default_factory=Cost)
    verify: Cost = field(default_factory=Cost)
    since_plain: int = 0


class Depth:
    """One for all requests of an engine."""

    def __init__(self) -> None:
        self._costs: dict[int, Costs] = {}
        self._usual_share = 0.5  # of drafts, that requests keep; new ones begin with it
        self._lost = 0.0  # seconds, against plain decoding
        self._spent = 0.0  # seconds

    def new_row(self) -> Kept:
        return Kept(self._usual_share)

    def kept(self, row: Kept, drafted: int, kept: int) -> None:
        """A row's drafts were verified."""
        row.add(drafted, kept)
        self._usual_share += LATEST / 4 * (kept / drafted - self._usual_share)

    def ran(self, num_rows: int, tokens: int, seconds: float, *, real_rows: int, has_drafts: bool) -> None:
        """A step of decode rows alone took so long, its drafting included. `num_rows`: as compiled."""
        costs = self._costs.setdefault(num_rows, Costs())
        (costs.verify if has_drafts else costs.plain).add(seconds)
        costs.since_plain = costs.since_plain + 1 if has_drafts else 0
        forget = 0.5 ** (1 / MEMORY)
        self._lost, self._spent = self._lost * forget, self._spent * forget + seconds
        if has_drafts and costs.plain.is_known:
            lost = seconds - tokens / max(real_rows, 1) * costs.plain.seconds
            self._lost = max(0.0, self._lost + lost)  # what was won is no reason to lose it again

    def pays(self, num_rows: int, expected: Sequence[float]) -> bool:
        """Whether to draft for the next step. `expected`: accepted drafts of each of its rows, 0 where it has none."""
        costs = self._costs.setdefault(num_rows, Costs())
        if not costs.verify.is_known:
            return self._may_lose(costs.plain.seconds)
        if not costs.plain.is_known or costs.since_plain >= PLAIN_TRY:
            return False
        plain, verify = costs.plain.seconds, costs.verify.seconds
        worth = (len(expected) + sum(expected)) / max(len(expected), 1) * plain
        return worth > verify or self._may_lose(verify - worth)

    def _may_lose(self, seconds: float) -> bool:
        return self._lost + seconds <= SHARE * self._spent
