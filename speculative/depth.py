"""How many drafts each row of the next step gets, from what drafts have been worth and what steps have cost.

A step of R rows gives R tokens and those of its drafts that are right. With drafts it takes longer, and the longer the
more rows there are: for a few rows the device waits for memory and verifies for little, for many each draft costs what
a token does. So of all that was offered the drafts with the best chances are taken, as many as make the step give most
tokens a second; in a full batch that may be a long quotation's alone, or none. A draft on the device is asked where its
drafts, at the price of asking, make more of the step than those that were looked up.

Chances are learnt from what was verified, and from what would have been had it been asked; costs from each step. What
has not paid is tried now and then, from a small share of all time.

Pure: numbers in, numbers out. Knows no clock, no requests and no proposer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .chances import GUESSED, Chances
from .costs import Costs, nearest

COUNTED = 0.8
"""Of a draft's chance. Of many drafts the best are taken, among them those whose chances were overrated; and where no
request waits for the place of another, an answer that ends sooner saves less than its share of a step. By simulation of
both, a batch that is refilled and one that is not, with the costs of an Intel Xeon: 0.8 does better than 1 and 0.65."""

SHARE = 0.01
"""Of all time, may be lost in tries."""

PATIENCE = 500
"""Steps after which a try that is too dear loses its turn."""

MEMORY = 400
"""Steps after which what they lost is half forgotten."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One row's drafts."""

    source: int  # see `chances`
    most: int  # that may be of use
    is_forced: bool = False  # gets them all, whatever they cost

    @property
    def asks_device(self) -> bool:
        return self.source == GUESSED


@dataclass(frozen=True)
class Choice:
    """Drafts of each offer, and what they are for."""

    counts: Sequence[int]
    tokens: float  # of the step, by expectation
    cost: float  # of the step, in plain ones

    @property
    def worth(self) -> float:
        return self.tokens / self.cost


class Depth:
    """One for all requests of an engine."""

    def __init__(self) -> None:
        self.chances = Chances()
        self._costs: dict[int, Costs] = {}
        self._lost = 0.0  # seconds, in tries
        self._spent = 0.0  # seconds
        self._turn = 0
        self._waited = 0  # steps for this turn's try
        self._is_try = False  # the latest choice

    def choose(self, num_rows: int, real_rows: int, offers: Sequence[Offer]) -> Sequence[int]:
        """Drafts of each offer in the next step of `real_rows` rows, which costs what one of `num_rows` does."""
        self._is_try = False
        costs = self._of(num_rows)
        forced = [offer.most if offer.is_forced else 0 for offer in offers]
        if not offers or (costs.is_plain_due and not any(forced)):
            return forced
        found = [self._best(costs, real_rows, offers, may_ask=ask) for ask in {offer.asks_device for offer in offers}]
        best = max(found, key=lambda choice: choice.worth)
        if any(forced):
            return best.counts
        usual = best if best.worth > real_rows else Choice(forced, real_rows, 1.0)
        others = [self._all(costs, real_rows, offers)]
        return self._tried(costs, others if usual is best else [*others, best], usual)

    def ran(self, num_rows: int, num_drafts: int, seconds: float, asking: float) -> None:
        """A step of decode rows alone took so long, and so long the asking for its drafts before it."""
        costs = self._of(num_rows)
        forget = 0.5 ** (1 / MEMORY)
        self._lost, self._spent = self._lost * forget, self._spent * forget + seconds + asking
        if not num_drafts:
            costs.ran_plainly(seconds)
            return
        costs.ran(num_drafts, seconds)

    def asked(self, num_rows: int, num_asked: int, seconds: float) -> None:
        """A draft on the device was asked for so many of the rows. One that reads late may have had much to read."""
        longer = self._of(num_rows).asked(num_asked, seconds)
        if self._is_try:
            self._lost += longer

    def _of(self, num_rows: int) -> Costs:
        if num_rows not in self._costs:
            self._costs[num_rows] = nearest(self._costs, num_rows)
        return self._costs[num_rows]

    def _best(self, costs: Costs, num_rows: int, offers: Sequence[Offer], *, may_ask: bool) -> Choice:
        """Of the choices with at least one draft, so it may be worth less than none."""
        counts, tokens, asked = [0] * len(offers), float(num_rows), 0
        waiting: list[tuple[float, int]] = []
        for index, offer in enumerate(offers):
            if offer.asks_device and not (may_ask or offer.is_forced):
                continue
            chances = self.chances.expected(offer.source, offer.most)
            asked += offer.asks_device
            if offer.is_forced:
                counts[index], tokens = offer.most, tokens + sum(chances)
            else:
                waiting += [(-COUNTED * chance, index) for chance in chances]
        num_drafts = sum(counts)
        without, per_draft = costs.of_drafts(asked)
        cost = without + per_draft * num_drafts if num_drafts else 1.0
        # The best chances first, a row's own in order. Each adds less than the one before, so worth has one summit.
        for chance, index in sorted(waiting):
            longer = without + per_draft * (num_drafts + 1)
            if num_drafts and (tokens - chance) * cost <= tokens * longer:
                break
            counts[index], num_drafts, tokens, cost = counts[index] + 1, num_drafts + 1, tokens - chance, longer
        return Choice(counts, tokens, cost)

    def _tried(self, costs: Costs, others: Sequence[Choice], usual: Choice) -> Sequence[int]:
        """What usually is best, or now and then another choice, for what it teaches: all drafts, as what few of them
        cost says little of what many do; and where nothing pays, in turn with the least that could be."""
        tried = others[self._turn % len(others)]
        # By expectation; but at least half of what it costs more, or good hopes would be tried for ever.
        lost = max(tried.cost - tried.tokens / usual.worth, (tried.cost - usual.cost) / 2) * costs.plain
        self._waited += 1
        is_due = list(tried.counts) != list(usual.counts) and self._lost + lost <= SHARE * self._spent
        if is_due or self._waited > PATIENCE:
            self._turn, self._waited = self._turn + 1, 0
        if not is_due:
            return usual.counts
        self._is_try = True
        self._lost += lost
        return tried.counts

    def _all(self, costs: Costs, num_rows: int, offers: Sequence[Offer]) -> Choice:
        right = sum(sum(self.chances.expected(offer.source, offer.most)) for offer in offers)
        without, per_draft = costs.of_drafts(sum(offer.asks_device for offer in offers))
        counts = [offer.most for offer in offers]
        return Choice(counts, num_rows + COUNTED * right, without + per_draft * sum(counts))
