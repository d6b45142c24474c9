"""Every architecture in every kind of step, against transformers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from .driver import Driver, Stream, decode, prefill
from .models import CONFIGS, Reference, random_tokens

P, D = prefill, decode

# Each step is a list of (row, stream, tokens): decode rows first.
SCHEDULES: dict[str, list[list[tuple[Callable, int, int]]]] = {
    "prefill": [[(P, 0, 23)]],
    "two prompts in one call": [[(P, 0, 9), (P, 1, 14)]],
    "one-token prompt": [[(P, 0, 1), (P, 1, 2)]],
    "chunks": [[(P, 0, 5)], [(P, 0, 11)], [(P, 0, 1)], [(P, 0, 8)]],
    "decode": [[(P, 0, 6), (P, 1, 17)], [(D, 0, 1), (D, 1, 1)], [(D, 0, 1), (D, 1, 1)], [(D, 1, 1)]],
    "mixed": [
        [(P, 0, 12)],
        [(D, 0, 1), (P, 1, 10)],
        [(D, 0, 1), (P, 1, 7), (P, 2, 3)],
        [(D, 0, 1), (D, 1, 1), (D, 2, 1)],
    ],
    "verify": [[(P, 0, 7), (P, 1, 15)], [(D, 0, 4), (D, 1, 2)], [(D, 0, 1), (D, 1, 4)]],
    "verify beside a prompt": [[(P, 0, 7)], [(D, 0, 3), (P, 1, 16)]],
}


def check(driver: Driver, reference: Reference, schedule: list, *, tight: bool = False, atol: float = 1e-4) -> None:
    streams = [Stream(random_tokens(40, seed)) for seed in range(3)]
    expected = [reference.logits(stream.tokens) for stream in streams]
    for step in schedule:
        rows = [kind(streams[index], count) for kind, index, count in step]
        starts = [row.stream.computed for row in rows]
        results = driver.step(rows, driver.tight_shape(rows) if tight else None)
        for (kind, index, count), start, result in zip(step, starts, results, strict=True):
            first = start if kind is D else start + count - 1
            np.testing.assert_allclose(result.logits, expected[index][first : start + count], atol=atol, rtol=0)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name: str, schedule: str, reference, drive) -> None:
    model = reference(name)
    check(drive(model), model, SCHEDULES[schedule])


@pytest.mark.parametrize("block_size", [1, 5, 8, 16, 96])
@pytest.mark.parametrize("name", ["llama", "mistral-window", "gpt2"])
def test_block_size_changes_nothing(name: str, block_size: int, reference, drive) -> None:
    model = reference(name)
    driver = drive(model, block_size=block_size)
    check(driver, model, SCHEDULES["mixed"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_shapes_without_padding(schedule: str, reference, drive) -> None:
    model = reference("llama-odd")
    check(drive(model), model, SCHEDULES[schedule], tight=True)


def test_drafts_that_were_rejected_leave_no_trace(reference, drive) -> None:
    model = reference("llama")
    driver, stream = drive(model), Stream(random_tokens(20, 0))
    driver.step([prefill(stream, 10)])
    wrong = Stream([*stream.tokens[:10], 1, 2, 3], stream.blocks, stream.computed)
    driver.step([decode(wrong, 3)])
    result = driver.step([decode(stream, 2)])[0]
    np.testing.assert_allclose(result.logits, model.logits(stream.tokens)[10:12], atol=1e-4)


def test_copied_blocks_continue_the_stream(reference, drive) -> None:
    model = reference("llama")
    driver, stream = drive(model, block_size=8), Stream(random_tokens(20, 1))
    driver.step([prefill(stream, 12)])
    copy = Stream(stream.tokens, computed=12)
    driver.give_blocks(copy, 12)
    driver.device.copy_blocks(list(zip(stream.blocks, copy.blocks, strict=True)))
    result = driver.step([decode(copy)])[0]
    np.testing.assert_allclose(result.logits, model.logits(stream.tokens)[12:13], atol=1e-4)


def test_padding_does_not_write_to_a_request(reference, drive) -> None:
    model = reference("llama")
    driver, first, second = drive(model), Stream(random_tokens(20, 2)), Stream(random_tokens(20, 3))
    driver.step([prefill(first, 10)])
    driver.step([prefill(second, 3)])  # with padding behind it
    result = driver.step([decode(first)])[0]
    np.testing.assert_allclose(result.logits, model.logits(first.tokens)[10:11], atol=1e-4)


def test_a_short_row_beside_a_wide_one_writes_only_its_own_tokens(reference, drive) -> None:
    model = reference("llama")
    driver, wide, short = drive(model), Stream(random_tokens(20, 4)), Stream(random_tokens(20, 5))
    driver.step([prefill(wide, 8), prefill(short, 7)])
    short.blocks.append(wide.blocks[0])  # where the short row's padding would land
    driver.step([decode(wide, 3), decode(short, 1)])
    result = driver.step([decode(wide)])[0]
    np.testing.assert_allclose(result.logits, model.logits(wide.tokens)[11:12], atol=1e-4)
