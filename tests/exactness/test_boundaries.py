"""Every size of every ladder, one below, at it and one above: prompts, contexts and rows of decoding.

The ladders are read from the plan that the engine serves with, so a new default is tested as it comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ..tools.prompts import Prompt
from .conftest import LENGTH, greedy

if TYPE_CHECKING:
    from ..tools.engine import Engine
    from ..tools.reference import Reference


@pytest.fixture(scope="module")
def engine(running: Callable[..., Any]) -> Iterator[Engine]:
    """No prefix caching: every prompt is computed whole."""
    with running(enable_prefix_caching=False) as engine:
        yield engine


@pytest.fixture(scope="module")
def text(prompts: list[Prompt]) -> list[int]:
    """More tokens than the model may hold, of many kinds."""
    tokens = [token for prompt in sorted(prompts, key=lambda prompt: -len(prompt.tokens)) for token in prompt.tokens]
    assert len(tokens) >= LENGTH
    return tokens


def around(sizes: Iterable[int], most: int) -> list[int]:
    return sorted({near for size in sizes for near in (size - 1, size, size + 1) if 1 <= near <= most})


def test_around() -> None:
    assert around([0, 1, 4], 4) == [1, 2, 3, 4]


def test_prompts(engine: Engine, text: list[int], reference: Reference, *, full: bool) -> None:
    sizes = engine.config.plan.prefill_tokens
    assert len(sizes) > 4
    lengths = around(sizes, LENGTH - 2) if full else sorted({*sizes, *(size + 1 for size in sizes)} - {0})
    prompts = [text[:length] for length in lengths]
    reference.check(zip(prompts, engine.run(prompts, greedy(2), at_once=1), strict=True))


def test_two_prompts_in_one_step(engine: Engine, text: list[int], reference: Reference) -> None:
    """Together they are one below, at and one above a size."""
    prompts = []
    for total in around([32, 64, 128], LENGTH):
        prompts += [text[: total // 3], text[50 : 50 + total - total // 3]]
    reference.check(zip(prompts, engine.run(prompts, greedy(2), at_once=2), strict=True))


def test_contexts(engine: Engine, text: list[int], reference: Reference) -> None:
    """Each answer begins two tokens before a size and ends two behind it, or at the model's length."""
    sizes = engine.config.plan.contexts
    assert sizes[-1] == LENGTH
    prompts = [text[: size - 2] for size in sizes]
    answers = engine.run(prompts, greedy(4), at_once=1)
    assert [len(answer) for answer in answers] == [4] * (len(sizes) - 1) + [2]
    reference.check(zip(prompts, answers, strict=True))


def test_rows(engine: Engine, text: list[int], reference: Reference) -> None:
    sizes = engine.config.plan.decode_rows
    assert sizes[-1] == 8
    for rows in around(sizes, 8):
        prompts = [text[20 * row : 20 * row + 5 + row] for row in range(rows)]
        reference.check(zip(prompts, engine.run(prompts, greedy(4), at_once=rows), strict=True))


def test_buckets_of_the_shell(running: Callable[..., Any], text: list[int], reference: Reference) -> None:
    """The classic variables: few, coarse, and not powers of two."""
    with pytest.MonkeyPatch.context() as shell:
        shell.setenv("NEURON_CONTEXT_LENGTH_BUCKETS", "200,48,48,")
        shell.setenv("NEURON_TOKEN_GEN_BUCKETS", "96,256")
        with running(max_model_len=256) as engine:
            assert engine.config.plan.prefill_tokens == (0, 48, 200)
            assert engine.config.plan.contexts == (96, 256)
            prompts = [text[:length] for length in (1, 47, 48, 49, 94, 95, 96, 97, 199, 200, 201, 252)]
            reference.check(zip(prompts, engine.run(prompts, greedy(4), at_once=3), strict=True))
