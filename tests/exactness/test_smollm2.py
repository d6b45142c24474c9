"""Greedy tokens equal transformers' however a request was batched, chunked, cached, preempted or late.

Each engine has one block size and one way of cutting prompts; every test is one way of arriving. Without `--full`:
ten prompts (alone five), 24 tokens each, on three engines; with it, all forty and 64 on four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ..tools.prompts import Prompt
from .conftest import LENGTH, greedy

if TYPE_CHECKING:
    from ..tools.engine import Engine
    from ..tools.reference import Reference

# Chunks of 32 cut every prompt above that. 80 blocks of 16 hold one long sequence and not eight, so some are preempted.
ENGINES: dict[str, dict[str, Any]] = {
    "block_8_chunks_32": {"block_size": 8, "options": {"chunk_tokens": 32}},
    "block_32": {"block_size": 32},
    "block_16_tiny_cache": {"block_size": 16, "num_gpu_blocks_override": 80},
    "block_whole": {"block_size": LENGTH},
}


QUICK = ("block_8_chunks_32", "block_16_tiny_cache", "block_whole")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in ENGINES]
)
def engine(request: pytest.FixtureRequest, running: Callable[..., Any]) -> Iterator[Engine]:
    with running(**ENGINES[request.param]) as engine:
        yield engine


@pytest.fixture
def cold(engine: Engine) -> Engine:
    """The engine as if just started: no cached prefix, nothing counted."""
    engine.forget()
    engine.num_preemptions = engine.num_steps = 0
    return engine


def check(reference: Reference, prompts: list[Prompt], tokens: list[list[int]]) -> None:
    reference.check(zip([prompt.tokens for prompt in prompts], tokens, strict=True))


@pytest.mark.usefixtures("one_at_a_time", "cold")
def test_alone(engine: Engine, prompts: list[Prompt], num_tokens: int, reference: Reference, *, full: bool) -> None:
    prompts = prompts if full else prompts[1::2]
    tokens = engine.run([prompt.tokens for prompt in prompts], greedy(num_tokens), at_once=1)
    assert all(len(answer) == num_tokens for answer in tokens)
    check(reference, prompts, tokens)


def test_eight_at_once(cold: Engine, prompts: list[Prompt], num_tokens: int, reference: Reference) -> None:
    longest_first = sorted(prompts, key=lambda prompt: -len(prompt.tokens))
    tokens = cold.run([prompt.tokens for prompt in longest_first], greedy(num_tokens), at_once=8)
    check(reference, longest_first, tokens)
    is_tiny = cold.core.vllm_config.cache_config.num_gpu_blocks_override is not None
    assert (cold.num_preemptions > 0) == is_tiny


def test_joined_late(cold: Engine, prompts: list[Prompt], num_tokens: int, reference: Reference) -> None:
    """One after the other, three steps apart: each meets the others somewhere in their answers, or in their prompts."""
    for prompt in prompts:
        cold.add(prompt.id, prompt.tokens, greedy(num_tokens))
        cold.step(3)
    cold.finish()
    check(reference, prompts, [cold.tokens[prompt.id] for prompt in prompts])


def test_prefix_hit(cold: Engine, prompts: list[Prompt], num_tokens: int, reference: Reference) -> None:
    if cold.config.one_block_per_sequence:
        pytest.skip("a block is a whole sequence: nothing is shared")
    prompts = prompts[:40:2]
    block = cold.config.block_size
    for prompt in prompts:
        for time, count in (("first", 2), ("again", num_tokens)):  # what is hit are blocks of the prompt
            cold.add(time, prompt.tokens, greedy(count))
            cold.finish()
            check(reference, [prompt], [cold.tokens[time]])
        # Whole blocks, and never the last token: its logits are wanted.
        assert cold.cached_tokens["again"] == (len(prompt.tokens) - 1) // block * block


def test_a_longer_prompt_continues_a_cached_one(cold: Engine, prompts: list[Prompt], reference: Reference) -> None:
    if cold.config.one_block_per_sequence:
        pytest.skip("a block is a whole sequence: nothing is shared")
    whole = max(prompts, key=lambda prompt: len(prompt.tokens)).tokens
    for length in (100, 101, 333, 600, len(whole)):
        cold.add(str(length), whole[:length], greedy(4))
        cold.finish()
        reference.check([(whole[:length], cold.tokens[str(length)])])
    assert cold.cached_tokens["600"] >= 320


def test_chunks_are_cut(cold: Engine, prompts: list[Prompt], reference: Reference) -> None:
    """A prompt takes the steps its chunks need, and a neighbour that decodes gets its token in each of them."""
    chunk = cold.config.plan.chunk_tokens
    assert chunk is not None
    long, short = (
        max(prompts, key=lambda prompt: len(prompt.tokens)),
        min(prompts, key=lambda prompt: len(prompt.tokens)),
    )
    num_chunks = -(-len(long.tokens) // chunk)
    cold.add("short", short.tokens, greedy(num_chunks + 4))
    cold.step(2)
    cold.add("long", long.tokens, greedy(4))
    cold.step(num_chunks - 1)
    assert "long" not in cold.tokens
    cold.step()
    assert len(cold.tokens["long"]) == 1
    assert len(cold.tokens["short"]) == 2 + num_chunks
    cold.finish()
    check(reference, [short, long], [cold.tokens["short"], cold.tokens["long"]])
