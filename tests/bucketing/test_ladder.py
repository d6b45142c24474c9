"""Ladders: sorted, covering, and never further apart than promised."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuronserve.bucketing import ladder
from neuronserve.bucketing.errors import BadBuckets, DoesNotFit
from neuronserve.bucketing.ladder import Ladder

limits = st.integers(1, 200_000)
ladders = st.sets(st.integers(1, 10_000), min_size=1, max_size=40).map(lambda sizes: tuple(sorted(sizes)))


@pytest.mark.parametrize(
    ("limit", "start", "expected"),
    [
        (16, 1, (1, 2, 4, 8, 16)),
        (12, 1, (1, 2, 4, 8, 12)),
        (1, 1, (1,)),
        (1000, 128, (128, 256, 512, 1000)),
        (100, 128, (100,)),
        (128, 128, (128,)),
        (129, 128, (128, 129)),
    ],
)
def test_powers_of_two_end_at_the_limit(limit: int, start: int, expected: tuple[int, ...]) -> None:
    assert ladder.powers_of_two(limit, start) == expected


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (256, (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 240, 256)),
        (128, (16, 32, 48, 64, 80, 96, 112, 128)),
        (100, (16, 32, 48, 64, 80, 96, 100)),
        (7, (7,)),
        (512, (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 240, 288, 352, 432, 512)),
    ],
)
def test_fine_ladder(limit: int, expected: tuple[int, ...]) -> None:
    assert ladder.fine(limit) == expected


@given(limits)
def test_fine_ladder_has_steps_of_16_then_at_most_a_quarter(limit: int) -> None:
    sizes = ladder.fine(limit)
    assert sizes[0] == min(16, limit)
    assert sizes[-1] == limit
    for low, high in pairwise(sizes):
        assert low < high <= max(low + 16, low * 1.25)
        assert high - low == 16 or high > 128 or high == limit


@given(limits, st.integers(1, 512))
def test_powers_of_two_double_at_most(limit: int, start: int) -> None:
    sizes = ladder.powers_of_two(limit, start)
    assert sizes[-1] == limit
    assert all(low < high <= 2 * low for low, high in pairwise(sizes))


@given(ladders, st.integers(1, 12_000))
def test_fit_is_the_smallest_size_that_holds(sizes: tuple[int, ...], length: int) -> None:
    holders = [size for size in sizes if size >= length]
    if holders:
        assert Ladder(sizes).fit(length) == min(holders)
    else:
        with pytest.raises(DoesNotFit, match=f"{length} tokens, largest compiled size is {sizes[-1]}"):
            Ladder(sizes).fit(length)


@given(ladders)
def test_ranges_tile_every_length_once(sizes: tuple[int, ...]) -> None:
    served = [length for low, high in Ladder(sizes).ranges() for length in range(low, high + 1)]
    assert served == list(range(1, sizes[-1] + 1))


@pytest.mark.parametrize("sizes", [(), (0, 1), (2, 1), (1, 1)])
def test_a_ladder_rises(sizes: tuple[int, ...]) -> None:
    with pytest.raises(BadBuckets, match="rising order"):
        Ladder(sizes)


def test_as_given_sorts_and_drops_repeats() -> None:
    assert ladder.as_given([512, 128, 512, 1000]) == (128, 512, 1000)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("128,512,1024", (128, 512, 1024)), (" 512, ,128,,128 ", (128, 512)), ("", None), (" , ", None), ("64", (64,))],
)
def test_parse_reads_a_variable(text: str, expected: tuple[int, ...] | None) -> None:
    assert ladder.parse(text, "KEY") == expected


@pytest.mark.parametrize(
    ("text", "culprit"), [("128,abc", "'abc'"), ("0", "'0'"), ("-4", "'-4'"), ("1.5", "'1.5'"), ("²", "'²'")]
)
def test_parse_names_key_value_and_remedy(text: str, culprit: str) -> None:
    with pytest.raises(BadBuckets) as error:
        ladder.parse(text, "NEURON_TOKEN_GEN_BUCKETS")
    assert culprit in str(error.value)
    assert repr(text) in str(error.value)
    assert "NEURON_TOKEN_GEN_BUCKETS=128,512,1024" in str(error.value)


@given(ladders, st.integers(1, 50))
def test_thinned_keeps_the_last_and_spreads_the_rest(sizes: tuple[int, ...], count: int) -> None:
    kept = ladder.thinned(sizes, count)
    assert len(kept) == min(count, len(sizes))
    assert kept[-1] == sizes[-1]
    places = [-1, *(sizes.index(size) for size in kept)]
    gaps = [after - before for before, after in pairwise(places)]
    assert min(gaps) >= 1
    assert max(gaps) - min(gaps) <= 1


def test_thinned_powers_of_two() -> None:
    assert ladder.thinned((128, 256, 512, 1024, 2048, 4096, 8192), 3) == (256, 2048, 8192)
