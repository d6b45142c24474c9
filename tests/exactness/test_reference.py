"""The judge itself: it finds the first token that differs, measures the gap, and does not excuse many."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ..tools.reference import NEAR, Mismatch, Reference, judge


def test_equal_tokens_pass() -> None:
    assert judge(torch.eye(4), [0, 1, 2, 3]) is None


def test_the_first_difference_is_reported_with_its_gap() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.5], [2.0, 1.75, 0.0], [0.0, 0.0, 9.0]])
    assert judge(logits, [1, 1, 0]) == Mismatch(position=1, ours=1, theirs=0, gap=0.25)


class Fixed(Reference):
    """Thinks the same of every text."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(Path())
        self.fixed = logits
        self.passes = 0

    def logits(self, prompt: object, tokens: object) -> torch.Tensor:
        self.passes += 1
        return self.fixed


def test_a_wrong_token_fails() -> None:
    with pytest.raises(AssertionError, match=r"token 0: 1, transformers has 0"):
        Fixed(torch.tensor([[1.0, 0.5]])).check([([7], [1])])


def test_one_near_tie_in_a_hundred_is_excused_and_two_are_not() -> None:
    near = Fixed(torch.tensor([[1.0, 1.0 - NEAR / 2]]))
    right, wrong = [([n], [0]) for n in range(99)], [([n], [1]) for n in range(200, 202)]
    near.check([*right, wrong[0]])
    with pytest.raises(AssertionError, match="2 of 101 sequences"):
        near.check([*right, *wrong])


def test_no_token_is_no_proof() -> None:
    with pytest.raises(AssertionError, match="without tokens"):
        Fixed(torch.eye(2)).check([([7], [])])


def test_a_sequence_is_computed_once() -> None:
    fixed = Fixed(torch.eye(2))
    fixed.check([([7], [0, 1]), ([7], [0, 1]), ([7], [0])])
    assert fixed.passes == 1


def test_the_first_token_is_known_from_what_was_checked() -> None:
    fixed = Fixed(torch.eye(2))
    assert fixed.first_token([7]) == 0
    fixed.check([([7], [0, 1])])
    assert fixed.first_token([7]) == 0
    assert fixed.passes == 2
