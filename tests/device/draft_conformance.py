"""What every device that drafts must do, whatever drafts: a model, an EAGLE head, the arithmetic device's rule.

A draft is held against itself: what it drafts after reading a request alone and in one call is what it must draft
however the request was read.
"""

from __future__ import annotations

import pytest

from neuronserve.neuron_worker.device.base import Want
from neuronserve.neuron_worker.device.errors import DeviceError

from .conformance import LONGEST, NUM_DRAFTS, PROMPTS, Bench, advance, alone, read_prompt
from .driver import Driver, Stream, decode, prefill


def drafts_after(driver: Driver, tokens: list[int]) -> list[int]:
    """What follows `tokens`, by a draft that read all of them in one call."""
    stream = Stream(list(tokens))
    driver.step([prefill(stream, len(tokens) - 1, want=Want.NOTHING)])
    [drafts] = driver.draft([tokens[-1]])
    return drafts


def verify(driver: Driver, stream: Stream, drafts: list[int]) -> list[int]:
    """A step of the stream's newest token and `drafts`: the tokens that the device itself has after each."""
    stream.tokens += drafts
    [result] = driver.step([decode(stream, 1 + len(drafts), want=Want.TOKEN)])
    return [int(token) for token in result.tokens]


def keep(stream: Stream, drafts: list[int], right: list[int]) -> int:
    """Drop the drafts that were wrong, append the device's own token; how many tokens of the step stand."""
    accepted = next((i for i, draft in enumerate(drafts) if draft != right[i]), len(drafts))
    dropped = len(drafts) - accepted
    del stream.tokens[len(stream.tokens) - dropped :]
    stream.computed -= dropped
    stream.tokens.append(right[accepted])
    return 1 + accepted


class DraftConformance:
    def test_a_draft_that_is_the_model_is_right(self, bench: Bench) -> None:
        driver = bench.drafting()
        if not bench.place.drafts_itself:
            pytest.skip("another draft")
        expected = alone(driver, PROMPTS[0], 14)
        stream = Stream(list(PROMPTS[0]))
        read_prompt(driver, stream)
        [drafts] = driver.draft([stream.tokens[-1]])
        for _ in range(3):
            right = verify(driver, stream, drafts)
            assert drafts == right[:-1]
            standing = keep(stream, drafts, right)
            [drafts] = driver.draft([stream.tokens[-1]], [standing])
        assert stream.tokens == expected[: len(stream.tokens)]

    def test_drafts_do_not_depend_on_how_a_request_was_read(self, bench: Bench) -> None:
        driver = bench.drafting()
        tokens = alone(driver, PROMPTS[0], 1)
        expected = drafts_after(driver, tokens)
        stream = Stream(list(PROMPTS[0]))
        for count in (3, 1, 5):
            driver.step([prefill(stream, count, want=Want.NOTHING)])
            driver.draft([-1])
        read_prompt(driver, stream)
        assert driver.draft([tokens[-1]]) == [expected]

    def test_drafts_do_not_depend_on_rejected_ones(self, bench: Bench) -> None:
        driver = bench.drafting()
        stream = Stream(list(PROMPTS[0]))
        read_prompt(driver, stream)
        driver.draft([stream.tokens[-1]])
        own = alone(driver, PROMPTS[0], 12)[len(PROMPTS[0]) + 1 :]
        for wrong_from in (0, 2, 1, 3):
            computed = len(stream.tokens) - len(PROMPTS[0]) - 1
            drafts = [(t + 5 * (i >= wrong_from)) % 97 for i, t in enumerate(own[computed : computed + NUM_DRAFTS])]
            standing = keep(stream, drafts, verify(driver, stream, drafts))
            found = driver.draft([stream.tokens[-1]], [standing])
            assert found == [drafts_after(driver, stream.tokens)]

    def test_drafts_do_not_depend_on_neighbours(self, bench: Bench) -> None:
        driver = bench.drafting()
        expected = [drafts_after(driver, alone(driver, prompt, 2)) for prompt in PROMPTS]
        streams = [Stream(list(prompt)) for prompt in PROMPTS]
        results = driver.step([prefill(stream, len(stream.tokens), want=Want.TOKEN) for stream in streams])
        driver.draft([int(result.tokens[0]) for result in results])
        for stream, result in zip(streams, results, strict=True):
            stream.tokens.append(int(result.tokens[0]))
        advance(driver, streams)
        assert driver.draft([stream.tokens[-1] for stream in streams]) == expected

    def test_a_mixed_step_drafts_for_both_parts(self, bench: Bench) -> None:
        driver = bench.drafting()
        expected = [
            drafts_after(driver, alone(driver, prompt, count)) for prompt, count in ((PROMPTS[0], 2), (PROMPTS[1], 1))
        ]
        first, second, third = (Stream(list(prompt)) for prompt in PROMPTS)
        read_prompt(driver, first)
        driver.draft([first.tokens[-1]])
        rows = [
            decode(first, want=Want.TOKEN),
            prefill(second, len(second.tokens), want=Want.TOKEN),
            prefill(third, 4, want=Want.NOTHING),
        ]
        results = driver.step(rows)
        drafts = driver.draft([int(results[0].tokens[0]), int(results[1].tokens[0]), -1])
        assert drafts == [*expected, [-1] * NUM_DRAFTS]
        read_prompt(driver, third)
        assert driver.draft([third.tokens[-1]]) == [drafts_after(driver, third.tokens)]

    def test_a_shared_prefix_serves_the_draft_too(self, bench: Bench) -> None:
        driver = bench.drafting()
        tokens = alone(driver, PROMPTS[0], 1)
        expected = drafts_after(driver, tokens)
        owner = Stream(list(PROMPTS[0]))
        driver.step([prefill(owner, 8, want=Want.NOTHING)])
        driver.draft([-1])
        copy = Stream(list(PROMPTS[0]))
        driver.give_blocks(copy, 8)
        driver.device.copy_blocks([(owner.blocks[0], copy.blocks[0])])
        shared = Stream(list(PROMPTS[0]), blocks=owner.blocks[:1])
        for stream in (copy, shared):
            stream.computed = 8
            read_prompt(driver, stream)
            assert driver.draft([tokens[-1]]) == [expected]

    def test_drafts_at_the_end_of_the_positions_harm_nobody(self, bench: Bench) -> None:
        driver = bench.drafting()
        neighbour, long = Stream(list(PROMPTS[0])), Stream([7 + i % 60 for i in range(LONGEST - 2)])
        vocabulary = bench.bare().load(bench.place.model_dir, bench.options(driver.device.capabilities)).vocab_size
        read_prompt(driver, neighbour)
        driver.draft([neighbour.tokens[-1]])
        driver.step([prefill(long, len(long.tokens), want=Want.NOTHING)])
        long.tokens.append(9)
        for _ in range(2):  # the newest token at the last position, then behind it
            [drafts] = driver.draft([long.tokens[-1]])
            assert all(0 <= token < vocabulary for token in drafts)
            if long.computed < LONGEST:
                advance(driver, [long])
        advance(driver, [neighbour])
        assert driver.draft([neighbour.tokens[-1]]) == [drafts_after(driver, neighbour.tokens)]

    def test_a_row_that_ends_sooner_leaves_its_neighbours_theirs(self, bench: Bench) -> None:
        """In the rounds after it there is a row less, and the others are other rows of the call."""
        driver = bench.drafting()
        long, *others = Stream([7 + i % 60 for i in range(LONGEST - 3)]), *(Stream(list(p)) for p in PROMPTS[:2])
        streams = [long, *others]
        results = driver.step([prefill(stream, len(stream.tokens), want=Want.TOKEN) for stream in streams])
        driver.draft([int(result.tokens[0]) for result in results])
        for stream, result in zip(streams, results, strict=True):
            stream.tokens.append(int(result.tokens[0]))
        advance(driver, streams)  # two places are left of the long one's, for the newest token and one draft
        drafts = driver.draft([stream.tokens[-1] for stream in streams])
        assert drafts == [drafts[0], *(drafts_after(driver, stream.tokens) for stream in others)]
        assert drafts[0][:2] == drafts_after(driver, long.tokens)[:2]

    def test_drafts_beyond_a_rows_blocks_harm_nobody(self, bench: Bench) -> None:
        driver = bench.drafting()
        streams = [Stream([11 + i, *range(20, 27)]) for i in range(2)]  # a block each, and full
        driver.num_drafts = 0  # no blocks ahead
        driver.step([prefill(stream, 8, want=Want.NOTHING) for stream in streams])
        driver.draft([30, 31])
        driver.num_drafts = NUM_DRAFTS
        for stream, newest in zip(streams, (30, 31), strict=True):
            stream.tokens.append(newest)
        advance(driver, streams)
        found = driver.draft([stream.tokens[-1] for stream in streams])
        assert found == [drafts_after(driver, stream.tokens) for stream in streams]

    def test_a_draft_changes_nothing_for_the_model(self, bench: Bench) -> None:
        expected = alone(bench.driver(), PROMPTS[0], 6)
        driver = bench.drafting()
        assert alone(driver, PROMPTS[0], 6) == expected
        stream = Stream(list(PROMPTS[0]))
        read_prompt(driver, stream)
        for _ in range(5):
            driver.draft([stream.tokens[-1]])
            advance(driver, [stream])
        assert stream.tokens == expected

    def test_a_draft_without_its_step_is_refused(self, bench: Bench) -> None:
        driver = bench.drafting()
        stream, other = Stream(list(PROMPTS[0])), Stream(list(PROMPTS[1]))
        read_prompt(driver, stream)
        last = driver._last
        read_prompt(driver, other)
        driver._last, newest = last, driver._last
        with pytest.raises(DeviceError, match="not the last"):
            driver.draft([5])
        driver._last = newest
        assert driver.draft([other.tokens[-1]]) == [drafts_after(driver, other.tokens)]
