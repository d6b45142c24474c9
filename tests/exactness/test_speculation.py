"""Greedy tokens equal transformers' with drafts in every step, however a request arrived; seeded ones equal plain ones.

Each engine looks drafts up in the prompt. Without `--full`: ten prompts, 24 tokens each; with it, all forty and 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from ..tools.prompts import Prompt
from .conftest import greedy
from .test_smollm2 import check, test_alone, test_eight_at_once  # noqa: F401  (collected here, on this module's engine)

if TYPE_CHECKING:
    from vllm import SamplingParams

    from ..tools.engine import Engine
    from ..tools.reference import Reference

NUM_DRAFTS = 4

# Chunks of 32 cut every prompt above that. 80 blocks of 16 hold one long sequence and not eight, so some are preempted.
ENGINES: dict[str, dict[str, Any]] = {
    "chunks_32": {"block_size": 8, "options": {"chunk_tokens": 32}},
    "tiny_cache": {"block_size": 16, "num_gpu_blocks_override": 80},
}


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest, running: Callable[..., Any]) -> Iterator[Engine]:
    with running(speculative_model="ngram", num_speculative_tokens=NUM_DRAFTS, **ENGINES[request.param]) as engine:
        yield engine


@pytest.fixture
def cold(engine: Engine) -> Iterator[Engine]:
    """The engine as if just started; a test in which no draft was right would test nothing."""
    engine.forget()
    engine.num_preemptions = engine.num_steps = 0
    before = num_accepted(engine)
    yield engine
    assert num_accepted(engine) > before


def num_accepted(engine: Engine) -> int:
    worker = engine.llm.collective_rpc(lambda worker: worker)[0]
    return sum(kept * times for kept, times in worker.runner.counters.accepted_drafts.items())


def test_joined_late_and_left_early(cold: Engine, prompts: list[Prompt], num_tokens: int, reference: Reference) -> None:
    """One after the other, three steps apart; every third is aborted while drafts of it are waiting."""
    staying = [prompt for index, prompt in enumerate(prompts) if index % 3 != 2]
    for prompt in prompts:
        cold.add(prompt.id, prompt.tokens, greedy(num_tokens))
        cold.step(3)
        if prompt not in staying:
            cold.core.abort_request([prompt.id])
    cold.finish()
    check(reference, staying, [cold.tokens[prompt.id] for prompt in staying])


def test_prefix_hit(cold: Engine, prompts: list[Prompt], num_tokens: int, reference: Reference) -> None:
    """The second time, blocks are read in which rejected drafts stood before."""
    for prompt in prompts[::4]:
        cold.add("first", prompt.tokens, greedy(num_tokens))
        cold.finish()
        answered = [*prompt.tokens, *cold.tokens["first"]]
        cold.add("again", answered, greedy(num_tokens))
        cold.finish()
        reference.check([(prompt.tokens, cold.tokens["first"]), (answered, cold.tokens["again"])])
        # Whole blocks; those that the last step filled are not kept when the request ends in it.
        block, most = cold.config.block_size, len(answered) - 1
        kept = range((most - NUM_DRAFTS - 1) // block * block, most + 1, block)
        assert cold.cached_tokens["again"] in kept


def test_logprobs_are_those_of_plain_decoding(cold: Engine, prompts: list[Prompt], reference: Reference) -> None:
    """Sampled on the host, round by round: the same tokens."""
    params = greedy(16)
    params.logprobs = 2
    some = prompts[::2]
    check(reference, some, cold.run([prompt.tokens for prompt in some], params, at_once=4))


def seeded(num_tokens: int) -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(temperature=0.8, top_p=0.95, seed=11, max_tokens=num_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def plainly(running: Callable[..., Any], prompts: list[Prompt], num_tokens: int) -> list[list[int]]:
    """Seeded answers without drafts."""
    with running(block_size=16) as engine:
        return engine.run([prompt.tokens for prompt in prompts], seeded(num_tokens), at_once=8)


def test_a_seed_gives_the_tokens_of_plain_sampling(
    cold: Engine, prompts: list[Prompt], num_tokens: int, plainly: list[list[int]]
) -> None:
    assert cold.run([prompt.tokens for prompt in prompts], seeded(num_tokens), at_once=3) == plainly
