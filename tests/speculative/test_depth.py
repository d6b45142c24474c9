"""Adaptive depth against traffic made up for it: time is simulated, so nothing here depends on a clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from neuronserve.speculative.depth import FIRST_TRIES, Depth

NUM_DRAFTS = 4


@dataclass
class Traffic:
    """`rows` requests of `length` tokens at a time; each draft is right with probability `right` after right ones."""

    rows: int
    right: float
    verify: float  # seconds of a step with drafts, one without them takes 1
    found: float = 1.0  # how often a row has drafts at all
    length: int = 100
    random: np.random.Generator = field(repr=False, default_factory=lambda: np.random.default_rng(7))

    def run(self, depth: Depth, num_steps: int) -> float:
        """Tokens a second and row."""
        tokens = seconds = 0.0
        rows, left = [depth.new_row() for _ in range(self.rows)], [self.length] * self.rows
        for _ in range(num_steps):
            drafted = [NUM_DRAFTS if self.random.random() < self.found else 0 for _ in rows]
            expected = [row.share * count for row, count in zip(rows, drafted, strict=True)]
            has_drafts = any(drafted) and depth.pays(self.rows, expected)
            kept = [self.draw(count) if has_drafts else 0 for count in drafted]
            for row, count, own in zip(rows, drafted, kept, strict=True):
                if has_drafts and count:
                    depth.kept(row, count, own)
            took = (self.verify if has_drafts else 1.0) * self.random.uniform(0.95, 1.05)
            depth.ran(self.rows, self.rows + sum(kept), took, real_rows=self.rows, has_drafts=has_drafts)
            tokens, seconds = tokens + self.rows + sum(kept), seconds + took
            for index, own in enumerate(kept):
                left[index] -= 1 + own
                if left[index] <= 0:
                    rows[index], left[index] = depth.new_row(), self.length
        return tokens / self.rows / seconds

    def draw(self, count: int) -> int:
        right = self.random.random(count) < self.right
        return count if right.all() else int(np.argmin(right))

    @property
    def always(self) -> float:
        """The same, drafting in every step."""
        kept = sum(self.right**position for position in range(1, NUM_DRAFTS + 1))
        return (1 + self.found * kept) / self.verify


POOR = [
    Traffic(rows=1, right=0.0, verify=1.3),
    Traffic(rows=1, right=0.1, verify=1.3),
    Traffic(rows=1, right=0.2, verify=1.4, found=0.3),
    Traffic(rows=4, right=0.1, verify=2.0),
    Traffic(rows=8, right=0.3, verify=2.5),
    Traffic(rows=16, right=0.3, verify=4.0),
    Traffic(rows=16, right=0.0, verify=5.0, length=20),
]


@pytest.mark.parametrize("traffic", POOR, ids=str)
def test_poor_drafts_are_hardly_slower_than_none(traffic: Traffic) -> None:
    assert traffic.always < 1
    assert traffic.run(Depth(), 3000) > 0.97


@pytest.mark.parametrize(
    "traffic",
    [
        Traffic(rows=1, right=0.6, verify=1.3),
        Traffic(rows=1, right=0.3, verify=1.2),
        Traffic(rows=2, right=0.8, verify=1.8),
        Traffic(rows=16, right=0.9, verify=2.5),
    ],
    ids=str,
)
def test_good_drafts_give_nearly_all_that_they_can(traffic: Traffic) -> None:
    assert traffic.always > 1.1
    assert traffic.run(Depth(), 3000) > 0.95 * traffic.always


def test_one_depth_for_each_number_of_rows() -> None:
    """Alone drafts pay, in a full batch the same drafts do not."""
    depth = Depth()
    for _ in range(3):
        assert Traffic(rows=1, right=0.5, verify=1.3).run(depth, 1500) > 1.3
        assert Traffic(rows=16, right=0.5, verify=4.0).run(depth, 1500) > 0.97


def test_it_follows_the_traffic() -> None:
    depth = Depth()
    for _ in range(3):
        assert Traffic(rows=1, right=0.7, verify=1.3).run(depth, 1500) > 1.4
        assert Traffic(rows=1, right=0.05, verify=1.3).run(depth, 1500) > 0.96


def test_what_is_not_known_is_tried_first() -> None:
    depth = Depth()
    for has_drafts in [True] * FIRST_TRIES + [False] * FIRST_TRIES:
        assert depth.pays(1, [2.0]) == has_drafts
        depth.ran(1, 1, 1.2 if has_drafts else 1.0, real_rows=1, has_drafts=has_drafts)
    assert depth.pays(1, [2.0])
    assert not depth.pays(1, [0.01])
