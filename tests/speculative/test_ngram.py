"""Prompt lookup: examples by hand, and the rule restated slowly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuronserve.speculative.ngram import match
from neuronserve.speculative.proposer import (
    ASK_DEVICE,
    SHORTEST_BESIDE_A_HEAD,
    Context,
    LookupFirst,
    Proposal,
    make_proposer,
)
from neuronserve.speculative.settings import Speculation


def look(tokens: list[int], shortest: int = 1, longest: int = 3, count: int = 4) -> list[int]:
    text = np.array(tokens, dtype=np.int32)
    found = match(text, shortest, longest)
    return [] if found is None else found.continued(text, count)


@pytest.mark.parametrize(
    ("tokens", "drafts"),
    [
        ([], []),
        ([1], []),
        ([1, 2, 3], []),  # the last token is new
        ([1, 2, 3, 4, 5, 9, 1, 2], [3, 4, 5, 9]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], [4, 9, 1, 2]),  # of two occurrences the latest
        ([5, 1, 2, 3, 9, 6, 2, 4, 9, 5, 1, 2], [3, 9, 6, 2]),  # a longer match before a later one
        ([7, 8, 7, 8], [7, 8, 7, 8]),  # a loop goes on as a loop
        ([3, 3], [3, 3, 3, 3]),
        ([1, 2, 3, 1, 2, 3, 1], [2, 3, 1, 2]),
    ],
)
def test_by_hand(tokens: list[int], drafts: list[int]) -> None:
    assert look(tokens) == drafts


def test_a_match_shorter_than_asked_is_none() -> None:
    assert look([1, 2, 9, 5, 2], shortest=2) == []
    assert look([1, 2, 9, 1, 2], shortest=2, count=1) == [9]


def test_a_match_is_not_looked_for_beyond_the_longest() -> None:
    # With one token the latest 2 counts; with two it must follow a 1.
    tokens = [1, 2, 6, 5, 2, 7, 1, 2]
    assert look(tokens, longest=1, count=1) == [7]
    assert look(tokens, longest=2, count=1) == [6]


def slowly(tokens: list[int], shortest: int, longest: int, count: int) -> list[int]:
    for length in range(longest, shortest - 1, -1):
        suffix = tokens[len(tokens) - length :]
        for start in range(len(tokens) - length - 1, -1, -1):
            if len(suffix) == length and tokens[start : start + length] == suffix:
                text = list(tokens)
                for _ in range(count):
                    text.append(text[start + length + len(text) - len(tokens)])
                return text[len(tokens) :]
    return []


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 6),
)
def test_the_longest_match_and_of_these_the_latest(tokens: list[int], shortest: int, more: int, count: int) -> None:
    assert look(tokens, shortest, shortest + more, count) == slowly(tokens, shortest, shortest + more, count)


@given(st.lists(st.integers(0, 9), max_size=60))
def test_drafts_are_tokens_of_the_text(tokens: list[int]) -> None:
    drafts = look(tokens)
    assert len(drafts) in (0, 4)
    assert set(drafts) <= set(tokens)


def test_the_proposer_gives_no_more_than_are_of_use() -> None:
    proposer = make_proposer(Speculation("ngram", num_tokens=4, shortest_match=1, longest_match=3))
    assert proposer.propose(Context(np.array([1, 2, 3, 4, 1], dtype=np.int32), most=2)) == Proposal([2, 3], source=1)


def test_the_proposer_says_how_much_of_the_text_matched() -> None:
    proposer = make_proposer(Speculation("ngram", num_tokens=1, shortest_match=2, longest_match=3))
    for text, matched in (([9, 5, 6, 1, 8, 5, 6], 2), ([4, 5, 6, 1, 4, 5, 6], 3), ([3, 4, 5, 6, 1, 3, 4, 5, 6], 3)):
        assert proposer.propose(Context(np.array(text, dtype=np.int32), most=1)) == Proposal([1], source=matched)
    assert proposer.propose(Context(np.array([9, 6, 1, 8, 6], dtype=np.int32), most=1)) == Proposal()


def test_beside_a_head_only_what_repeats_itself_is_looked_up() -> None:
    proposer = make_proposer(Speculation("eagle", num_tokens=4, looks_up_first=True))
    assert isinstance(proposer, LookupFirst)
    shortest = SHORTEST_BESIDE_A_HEAD
    ending = list(range(20, 20 + shortest))
    known = np.array([*ending, 7, 8, 9, *ending], dtype=np.int32)
    assert proposer.propose(Context(known, most=2)) == Proposal([7, 8], source=shortest)
    new = np.array([*ending[1:], 7, 8, 9, *ending], dtype=np.int32)
    assert proposer.propose(Context(new, most=2)) == ASK_DEVICE
    assert proposer.propose(Context(new, most=2, drafted=[1, 2, 3])) == Proposal([1, 2])
