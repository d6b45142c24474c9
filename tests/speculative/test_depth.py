"""Adaptive depth against traffic made up for it: time is simulated, so nothing here depends on a clock."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import numpy as np
import pytest

from neuronserve.speculative.chances import GUESSED, LONGEST
from neuronserve.speculative.costs import FIRST
from neuronserve.speculative.depth import Depth, Offer

NUM_DRAFTS = 4


@dataclass
class Traffic:
    """`rows` requests; each draft is right with probability `right` after right ones. A plain step takes 1."""

    rows: int
    right: float
    fixed: float  # that a step with drafts takes longer
    per_draft: float  # and for each of them
    asking: float = 0.0  # the device, for any number of drafts
    found: float = 1.0  # how often a row has drafts at all
    source: int = 3
    also_right: float | None = None  # every second row's drafts, which are quotations
    random: np.random.Generator = field(repr=False, default_factory=lambda: np.random.default_rng(7))

    def run(self, depth: Depth, num_steps: int) -> float:
        """Tokens a second and row."""
        tokens = seconds = 0.0
        for _ in range(num_steps):
            which = [row for row in range(self.rows) if self.random.random() < self.found]
            counts = depth.choose(self.rows, self.rows, [Offer(self.source_of(row), NUM_DRAFTS) for row in which])
            kept = 0
            for row, count in zip(which, counts, strict=True):
                right = self.draw(count, self.right_of(row))
                kept += right
                if count:
                    depth.chances.kept(self.source_of(row), count, right)
            took, asking = self.took(sum(counts)), 0.0
            if self.asking and any(counts):
                asking = self.asking * self.random.uniform(0.95, 1.05)
                depth.asked(self.rows, self.rows, asking)
            depth.ran(self.rows, sum(counts), took, asking)
            tokens, seconds = tokens + self.rows + kept, seconds + took + asking
        return tokens / self.rows / seconds

    def took(self, num_drafts: int) -> float:
        longer = self.fixed + self.per_draft * num_drafts if num_drafts else 0.0
        return (1 + longer) * self.random.uniform(0.9, 1.1)

    def source_of(self, row: int) -> int:
        return LONGEST if self.also_right is not None and row % 2 else self.source

    def right_of(self, row: int) -> float:
        return self.also_right if self.also_right is not None and row % 2 else self.right

    def draw(self, count: int, chance: float) -> int:
        right = self.random.random(count) < chance
        return count if right.all() else int(np.argmin(right))

    @property
    def always(self) -> float:
        """The same, every draft that is offered taken in every step."""
        kept = self.found * sum(self.right**position for position in range(1, NUM_DRAFTS + 1))
        return (1 + kept) / (1 + self.fixed + self.per_draft * NUM_DRAFTS * self.rows * self.found + self.asking)


POOR = [
    Traffic(rows=1, right=0.0, fixed=0.1, per_draft=0.05),
    Traffic(rows=1, right=0.1, fixed=0.0, per_draft=0.05, asking=0.2, source=GUESSED),
    Traffic(rows=1, right=0.2, fixed=0.4, per_draft=0.0),
    Traffic(rows=4, right=0.1, fixed=1.0, per_draft=0.0),
    Traffic(rows=4, right=0.2, fixed=0.05, per_draft=0.1),
    Traffic(rows=8, right=0.3, fixed=0.2, per_draft=0.05),
    Traffic(rows=8, right=0.3, fixed=0.2, per_draft=0.05, asking=0.2, source=GUESSED),
    Traffic(rows=16, right=0.3, fixed=3.0, per_draft=0.0),
    Traffic(rows=16, right=0.0, fixed=0.0, per_draft=0.06, source=LONGEST),
    Traffic(rows=40, right=0.2, fixed=0.0, per_draft=0.025, found=0.2),
]


@pytest.mark.parametrize("traffic", POOR, ids=str)
def test_poor_drafts_are_hardly_slower_than_none(traffic: Traffic) -> None:
    assert traffic.always < 1
    assert traffic.run(Depth(), 3000) > 0.97


GOOD = [
    Traffic(rows=1, right=0.6, fixed=0.1, per_draft=0.05),
    Traffic(rows=1, right=0.5, fixed=0.0, per_draft=0.05, asking=0.2, source=GUESSED),
    Traffic(rows=1, right=0.3, fixed=0.2, per_draft=0.0),
    Traffic(rows=2, right=0.8, fixed=0.8, per_draft=0.0),
    Traffic(rows=4, right=0.7, fixed=0.1, per_draft=0.06, found=0.5),
    Traffic(rows=16, right=0.9, fixed=1.5, per_draft=0.0),
]


@pytest.mark.parametrize("traffic", GOOD, ids=str)
def test_good_drafts_give_nearly_all_that_they_can(traffic: Traffic) -> None:
    assert traffic.always > 1.1
    assert traffic.run(Depth(), 3000) > 0.95 * traffic.always


def test_of_a_batch_the_rows_that_quote_are_drafted_for() -> None:
    """All drafts lose, and so does what a source's average says of both kinds of rows."""
    both = Traffic(rows=8, right=0.1, fixed=0.1, per_draft=0.08, source=1, also_right=0.95)
    quoting = 0.5 * sum(0.95**position for position in range(1, NUM_DRAFTS + 1))
    possible = (1 + quoting) / (1 + 0.1 + 0.08 * 4 * NUM_DRAFTS)
    assert (1 + quoting + 0.5 * 0.11) / (1 + 0.1 + 0.08 * 8 * NUM_DRAFTS) < 1 < possible
    assert both.run(Depth(), 3000) > 0.97 * possible


def test_a_row_gets_as_many_drafts_as_pay() -> None:
    """The first is right often enough, the fourth is not."""
    depth = Depth()
    assert Traffic(rows=4, right=0.5, fixed=0.0, per_draft=0.075).run(depth, 2000) > 1.05
    counts = [tuple(depth.choose(4, 4, [Offer(3, NUM_DRAFTS)] * 4)) for _ in range(20)]
    assert statistics.mode(counts) in ((1,) * 4, (2,) * 4)


def test_one_depth_for_each_number_of_rows() -> None:
    """Alone drafts pay, in a full batch the same drafts do not."""
    depth = Depth()
    for _ in range(3):
        assert Traffic(rows=1, right=0.5, fixed=0.3, per_draft=0.0).run(depth, 1500) > 1.3
        assert Traffic(rows=16, right=0.5, fixed=3.0, per_draft=0.0).run(depth, 1500) > 0.97


def test_it_follows_the_traffic() -> None:
    depth = Depth()
    for _ in range(3):
        assert Traffic(rows=1, right=0.7, fixed=0.3, per_draft=0.0).run(depth, 1500) > 1.4
        assert Traffic(rows=1, right=0.05, fixed=0.3, per_draft=0.0).run(depth, 1500) > 0.94


def test_what_a_draft_on_the_device_costs_is_learned() -> None:
    depth = Depth()
    cheap = Traffic(rows=1, right=0.45, fixed=0.0, per_draft=0.04, asking=0.1, source=GUESSED)
    dear = Traffic(rows=1, right=0.45, fixed=0.0, per_draft=0.04, asking=2.0, source=GUESSED)
    assert cheap.run(depth, 1500) > 1.3
    assert dear.run(depth, 1500) > 0.92
    cheap.run(depth, 3000)
    assert cheap.run(depth, 500) > 1.2


def test_what_a_plain_step_takes_is_found_out_first() -> None:
    depth = Depth()
    for _ in range(FIRST):
        assert list(depth.choose(1, 1, [Offer(LONGEST, 4)])) == [0]
        depth.ran(1, 0, 1.0, 0.0)
    assert list(depth.choose(1, 1, [Offer(LONGEST, 4)])) == [4]


def test_who_must_be_drafted_for_is() -> None:
    """Whatever it costs; its neighbour gains nothing by it."""
    depth = Depth()
    assert depth.choose(2, 2, [Offer(GUESSED, 3, is_forced=True), Offer(1, 4)])[0] == 3
    for _ in range(FIRST):
        depth.ran(2, 0, 1.0, 0.0)
    for _ in range(100):
        depth.ran(2, 3, 9.0, 0.0)
    assert list(depth.choose(2, 2, [Offer(GUESSED, 3, is_forced=True), Offer(1, 4)])) == [3, 0]


def test_who_is_beside_it_gets_drafts_that_pay_at_a_number_of_rows_never_seen() -> None:
    """Nor is there ever a plain step of it; what is known of fewer rows holds. Seconds are small, as they are."""
    depth, offers = Depth(), [Offer(1, 4)] * 8
    for _ in range(300):
        counts = depth.choose(8, 8, offers)
        for count in counts:
            if count:
                depth.chances.kept(1, count, 0)
        depth.ran(8, sum(counts), 0.01 + 0.001 * sum(counts), 0.0)
    counts = [depth.choose(9, 9, [Offer(3, 4, is_forced=True), *offers]) for _ in range(20)]
    assert [list(own) for own in counts] == [[4] + [0] * 8] * 20


def test_padding_gives_no_tokens() -> None:
    """17 rows in a shape of 32: what pays for the rows there are is drafted."""
    depth = Depth()
    for _ in range(FIRST):
        depth.ran(32, 0, 1.0, 0.0)
    for _ in range(100):
        depth.ran(32, 68, 1.5, 0.0)
        depth.ran(32, 0, 1.0, 0.0)
    counts = [sum(depth.choose(32, 17, [Offer(3, 4)] * 17)) for _ in range(10)]
    assert min(counts) > 17


def test_tries_go_on_where_all_drafts_are_too_dear() -> None:
    depth = Depth()
    poor = Traffic(rows=16, right=0.0, fixed=0.0, per_draft=0.3, source=LONGEST)
    good = Traffic(rows=16, right=0.98, fixed=0.0, per_draft=0.03, source=LONGEST)
    poor.run(depth, 1500)
    good.run(depth, 4000)
    assert good.run(depth, 300) > 1.1


def test_what_is_late_in_reading_is_paid_from_the_same_share() -> None:
    """A draft that never pays, and reads a long prompt when it is first asked."""
    depth, spent, lost = Depth(), 0.0, 0.0
    for _ in range(3000):
        counts = depth.choose(16, 16, [Offer(GUESSED, 4)] * 16)
        if any(counts):
            depth.asked(16, 16, 5.0)
            depth.chances.kept(GUESSED, 1, 0)
        asking = 5.0 if any(counts) else 0.0
        depth.ran(16, sum(counts), 1.0 + 0.05 * sum(counts), asking)
        spent, lost = spent + 1.0, lost + asking + 0.05 * sum(counts)
    assert lost < 0.03 * spent


def test_a_slow_moment_is_not_taken_for_the_cost_of_drafts() -> None:
    depth = Depth()
    good = Traffic(rows=1, right=0.6, fixed=0.1, per_draft=0.05)
    good.run(depth, 500)
    depth.ran(1, 4, 50.0, 0.0)  # the machine was busy with something else
    assert good.run(depth, 500) > 0.93 * good.always
