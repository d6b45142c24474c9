"""Chances of drafts by their source, and the lines that costs are."""

from __future__ import annotations

import numpy as np
import pytest

from neuronserve.speculative.chances import FIRST_ASSUMED, GUESSED, LONGEST, NEXT_ASSUMED, Chances
from neuronserve.speculative.costs import FIRST, Costs, Line, nearest


def test_before_anything_was_seen_something_is_assumed_of_every_source() -> None:
    chances = Chances()
    for source in range(LONGEST + 1):
        first, second = chances.expected(source, 2)
        assert first == pytest.approx(FIRST_ASSUMED[source])
        assert second == pytest.approx(FIRST_ASSUMED[source] * NEXT_ASSUMED[source])


def test_longer_endings_are_as_the_longest_known() -> None:
    chances = Chances()
    for _ in range(500):
        chances.kept(LONGEST + 5, 3, 0)
    assert chances.expected(LONGEST, 1)[0] < 0.1


@pytest.mark.parametrize("right", [0.1, 0.5, 0.9])
def test_chances_are_learned_place_by_place(right: float) -> None:
    chances, random = Chances(), np.random.default_rng(3)
    for _ in range(2000):
        drawn = random.random(4) < right
        chances.kept(GUESSED, 4, 4 if drawn.all() else int(np.argmin(drawn)))
    found = chances.expected(GUESSED, 4)
    assert found == sorted(found, reverse=True)
    assert found == pytest.approx([right**place for place in (1, 2, 3, 4)], abs=0.1)
    assert chances.expected(1, 1) == [pytest.approx(FIRST_ASSUMED[1])]  # another source's


def test_a_draft_after_a_wrong_one_says_nothing() -> None:
    chances = Chances()
    before = chances.expected(2, 2)
    for _ in range(100):
        chances.kept(2, 2, 0)
    first, second = chances.expected(2, 2)
    assert first < before[0]
    assert second / first == pytest.approx(before[1] / before[0])


def test_a_line_is_found_through_noise() -> None:
    line, random = Line(0.0, 0.0), np.random.default_rng(5)
    for _ in range(400):
        x = random.uniform(0, 4)
        line.add(x, 0.2 + 0.3 * x + random.uniform(-0.1, 0.1))
    assert [line.at(x) for x in (0.25, 1, 4)] == pytest.approx([0.275, 0.5, 1.4], abs=0.08)


def test_a_line_of_one_place_is_right_there() -> None:
    line = Line(0.0, 0.5)
    for _ in range(200):
        line.add(4.0, 0.8)
    assert line.at(4.0) == pytest.approx(0.8, abs=0.05)


def test_more_drafts_never_cost_less() -> None:
    line = Line(0.1, 0.1)
    for _ in range(50):
        line.add(0.0, 0.5)
        line.add(4.0, 0.1)
    fixed, slope = line.fit()
    assert slope == 0.0
    assert fixed == pytest.approx(line.at(4.0))


def test_rows_that_were_never_seen_are_as_their_neighbours() -> None:
    known = {1: Costs(1), 8: Costs(8)}
    for _ in range(FIRST):
        known[8].ran_plainly(2.0)
    for drafts in (4, 8, 16) * 30:
        known[8].ran(drafts, 2.0 + 0.1 * drafts)
        known[8].ran_plainly(2.0)
    new = nearest(known, 7)
    assert new.is_plain_due
    assert new.plain == pytest.approx(2.0, abs=0.01)
    assert new.of_drafts(0) == pytest.approx((1.0, 0.05), abs=0.01)
    assert nearest({}, 7).of_drafts(0) != pytest.approx((1.0, 0.05), abs=0.01)


def test_longer_texts_are_not_taken_for_dearer_drafts() -> None:
    """Plain steps take longer and longer; drafts cost what they cost."""
    costs = Costs(4)
    for step in range(400):
        plain = 1.0 + step / 200
        if costs.is_plain_due or step % 3 == 0:
            costs.ran_plainly(plain)
        else:
            costs.ran(8, plain + 0.4)
    without, per_draft = costs.of_drafts(0)
    assert costs.plain == pytest.approx(3.0, abs=0.1)
    assert costs.plain * (without + 8 * per_draft) == pytest.approx(3.4, abs=0.1)
