"""How much memory the cache gets."""

from __future__ import annotations

from typing import Any

import pytest

from neuronserve.neuron_worker import memory
from neuronserve.neuron_worker.memory import cache_bytes, free_bytes

GIB = 2**30
# Four sequences of 128 tokens are 32 blocks of 16, and one is vLLM's own.
LIMITS: dict[str, Any] = {
    "block_bytes": 1000,
    "block_size": 16,
    "max_num_seqs": 4,
    "max_model_len": 128,
    "given": None,
    "utilization": 0.9,
    "environ": {},
    "free": GIB,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 33_000),
        ({"max_model_len": 130}, 37_000),
        ({"free": 50_000}, 25_000),  # half of what is free
        ({"free": 50_000, "utilization": 0.2}, 10_000),
        ({"block_bytes": 200 * 2**20, "free": 99 * GIB}, 4 * GIB),  # 33 blocks would be 6.4 GiB
        ({"block_bytes": GIB, "free": 99 * GIB}, 9 * GIB),  # one sequence alone needs this much
        ({"given": 5}, 5),
        ({"environ": {"VLLM_CPU_KVCACHE_SPACE": "2"}}, 2 * GIB),
        ({"environ": {"VLLM_CPU_KVCACHE_SPACE": "0"}}, 33_000),
        ({"given": 5, "environ": {"VLLM_CPU_KVCACHE_SPACE": "2"}}, 5),
    ],
    ids=str,
)
def test_size_of_the_cache(changes: dict[str, Any], expected: int) -> None:
    assert cache_bytes(**{**LIMITS, **changes}) == expected


@pytest.mark.parametrize("value", ["many", "-1"])
def test_a_malformed_variable_is_named(value: str) -> None:
    with pytest.raises(ValueError, match=rf"VLLM_CPU_KVCACHE_SPACE='{value}': expected a number of GiB"):
        cache_bytes(**{**LIMITS, "environ": {"VLLM_CPU_KVCACHE_SPACE": value}})


def test_this_machine_has_some_memory_free() -> None:
    assert free_bytes() > 0


def test_slots_are_as_many_as_sequences_and_what_was_asked_beside_that_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(memory.logger, "warning", lambda line, *values: said.append(line % values))
    environ = {"VLLM_CPU_KVCACHE_SPACE": "2"}

    assert memory.slots_bytes(block_bytes=100, max_num_seqs=7, given=5000, environ=environ) == 800
    assert [line.split(" has no effect")[0] for line in said] == [
        "--kv-cache-memory-bytes 5000",
        "VLLM_CPU_KVCACHE_SPACE 2",
    ]
    said.clear()
    assert memory.slots_bytes(block_bytes=100, max_num_seqs=7, given=None, environ={}) == 800
    assert said == []
