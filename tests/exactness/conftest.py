"""The demo model through real vLLM on the cpu device, and transformers beside it."""

from __future__ import annotations

import os

# Before anything imports vLLM: it reads its environment once.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from ..tools.prompts import Prompt, read_prompts, subset

if TYPE_CHECKING:
    from vllm import SamplingParams

    from ..tools.engine import Engine

LENGTH = 1024
"""max_model_len of these engines: the longest prompt and 64 tokens fit."""


def greedy(num_tokens: int) -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


@pytest.fixture(scope="session")
def prompts(smollm2: Path, full: bool) -> list[Prompt]:
    every = read_prompts(smollm2)
    return every if full else subset(every)


@pytest.fixture(scope="session")
def num_tokens(full: bool) -> int:
    return 64 if full else 24


@pytest.fixture(scope="session")
def running(smollm2: Path) -> Callable[..., Any]:
    """`with running(**arguments of LLM) as engine`: the demo model in float32 with eight places."""
    from ..tools.engine import Engine

    @contextmanager
    def run(**arguments: Any) -> Iterator[Engine]:
        defaults = {"max_num_seqs": 8, "max_model_len": LENGTH, "dtype": "float32", "kv_cache_memory_bytes": 1 << 30}
        engine = Engine(str(smollm2), **{**defaults, **arguments})
        try:
            yield engine
        finally:
            engine.close()

    return run


@pytest.fixture
def one_at_a_time(request: pytest.FixtureRequest) -> None:
    """Skips on the engines that the test's module names in `NOT_ALONE`."""
    engine = request.node.callspec.id
    if engine in getattr(request.module, "NOT_ALONE", ()):
        pytest.skip("one at a time is asked of other engines, which compute it alike")
