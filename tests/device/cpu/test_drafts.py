"""A draft reads late: nothing while it is not asked, and then all that it has left, as if it had read in every step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from neuronserve.neuron_worker.device.base import Want
from neuronserve.neuron_worker.device.cpu import device as native
from neuronserve.neuron_worker.device.cpu.library import READ_AT_ONCE

from ..draft_conformance import drafts_after
from ..driver import Driver, Stream, decode, prefill
from ..eagle_heads import make_head
from ..models import LONGEST, Reference, random_tokens

Drive = Callable[..., Driver]


@pytest.fixture
def new_device() -> Callable[[], native.CpuDevice]:
    return native.CpuDevice


@pytest.fixture(params=["draft model", "head"])
def driver(
    request: pytest.FixtureRequest, reference: Callable[[str], Reference], drive: Drive, tmp_path: Path
) -> Driver:
    if request.param == "head":
        make_head(tmp_path, reference("llama"))
    draft = tmp_path if request.param == "head" else reference("qwen3").directory
    return drive(reference("llama"), draft=draft)


def read(driver: Driver, stream: Stream, *, ask: bool) -> list[int]:
    """The stream's tokens but the last, a few in a chunk and then one by one; what is drafted in the end."""
    driver.step([prefill(stream, 5, want=Want.NOTHING)])
    while stream.computed < len(stream.tokens) - 1:
        driver.draft([stream.tokens[stream.computed] if ask else -1])
        driver.step([decode(stream, want=Want.NOTHING)])
    [drafts] = driver.draft([stream.tokens[-1]])
    return drafts


@pytest.mark.parametrize("length", [7, 40, LONGEST - 4])
def test_drafts_are_those_of_a_draft_that_read_in_every_step(driver: Driver, length: int) -> None:
    tokens = random_tokens(length, 3)
    expected = drafts_after(driver, tokens)
    assert read(driver, Stream(list(tokens)), ask=True) == expected
    assert read(driver, Stream(list(tokens)), ask=False) == expected


def test_more_is_left_than_is_read_at_once(driver: Driver) -> None:
    length = LONGEST - 4
    texts = [random_tokens(length, seed) for seed in range(1 + READ_AT_ONCE // length)]
    assert len(texts) * length > READ_AT_ONCE
    expected = [drafts_after(driver, tokens) for tokens in texts]
    streams = [Stream(list(tokens)) for tokens in texts]
    driver.step([prefill(stream, length - 2, want=Want.NOTHING) for stream in streams])
    driver.step([decode(stream, want=Want.NOTHING) for stream in streams])
    assert driver.draft([tokens[-1] for tokens in texts]) == expected


def test_each_row_is_read_when_it_is_asked_for(driver: Driver) -> None:
    texts = [random_tokens(20, seed) for seed in range(3)]
    expected = [drafts_after(driver, tokens) for tokens in texts]
    streams = [Stream(list(tokens)) for tokens in texts]
    driver.step([prefill(stream, 19, want=Want.NOTHING) for stream in streams])
    for asked in range(3):
        newest = [tokens[-1] if row == asked else -1 for row, tokens in enumerate(texts)]
        assert driver.draft(newest)[asked] == expected[asked]


def test_a_prefix_that_nobody_read_is_read_by_who_shares_it(driver: Driver) -> None:
    tokens = random_tokens(24, 5)
    expected = drafts_after(driver, tokens)
    owner = Stream(list(tokens))
    driver.step([prefill(owner, 16, want=Want.NOTHING)])
    driver.draft([-1])
    copy = Stream(list(tokens))
    driver.give_blocks(copy, 16)
    driver.device.copy_blocks([(mine, its) for mine, its in zip(owner.blocks[:2], copy.blocks[:2], strict=True)])
    shared = Stream(list(tokens), blocks=owner.blocks[:2])
    for stream in (copy, shared):
        stream.computed = 16
        driver.step([prefill(stream, 7, want=Want.NOTHING)])
        assert driver.draft([tokens[-1]]) == [expected]


def test_between_two_parts_that_were_read(driver: Driver) -> None:
    """A block may be computed again by another request after those behind it were read."""
    tokens = random_tokens(28, 6)
    expected = drafts_after(driver, tokens)
    first = Stream(list(tokens))
    driver.step([prefill(first, 27, want=Want.NOTHING)])
    driver.draft([tokens[-1]])
    again = Stream(list(tokens))
    driver.give_blocks(again, 16)
    driver.device.copy_blocks([(first.blocks[0], again.blocks[0])])
    again.computed = 8
    driver.step([prefill(again, 8, want=Want.NOTHING)])  # its second block, which nobody has read
    mixed = Stream(list(tokens), blocks=[first.blocks[0], again.blocks[1], first.blocks[2]])
    mixed.computed = 24
    driver.step([prefill(mixed, 3, want=Want.NOTHING)])
    assert driver.draft([tokens[-1]]) == [expected]


def test_nothing_is_computed_where_nothing_is_asked(driver: Driver) -> None:
    device = driver.device
    assert isinstance(device, native.CpuDevice)
    assert device._session is not None
    stream = Stream(random_tokens(20, 7))
    driver.step([prefill(stream, 19, want=Want.NOTHING)])
    seconds = np.zeros(1000)
    device._session.profile(seconds)
    assert driver.draft([-1]) == [[-1] * driver.num_drafts]
    assert not seconds.any()
    driver.draft([stream.tokens[-1]])
    assert seconds.any()
    device._session.profile(None)
