"""How much memory the cache gets."""

from __future__ import annotations

from typing import Any

import pytest

from neuronserve.neuron_worker import memory
from neuronserve.neuron_worker.memory import cache_bytes, chip_bytes, free_bytes

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


CHIP = {"block_bytes": 2**20, "block_size": 16, "max_num_seqs": 8, "max_model_len": 4096, "utilization": 0.9}


def on_chip(**changes: Any) -> int:
    return chip_bytes(**{**CHIP, "given": None, "weight_bytes": 2**30, "cores": 1, "environ": {}, **changes})


def test_a_chip_has_room_for_every_sequence_whatever_the_host_has() -> None:
    assert on_chip() == (8 * 256 + 1) * 2**20


def test_a_chip_s_cache_ends_where_its_memory_does() -> None:
    # 16 GiB a core, nine tenths of it, less the weights.
    assert on_chip(max_num_seqs=800, weight_bytes=4 * 2**30) == int(16 * 0.9 * 2**30) - 4 * 2**30
    assert on_chip(max_num_seqs=800, weight_bytes=4 * 2**30, cores=2) == int(32 * 0.9 * 2**30) - 4 * 2**30


def test_a_chip_without_room_for_one_sequence_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"max-model-len 4096 needs 269484032 bytes of cache, 0 are left .* 1 core:"):
        on_chip(weight_bytes=15 * 2**30)


def test_a_cache_that_was_asked_for_must_fit_the_chip() -> None:
    assert on_chip(given=2 * 2**30) == 2 * 2**30
    with pytest.raises(
        ValueError, match=r"--kv-cache-memory-bytes 17179869184: the weights leave 16106127360 of 1 core"
    ):
        on_chip(given=16 * 2**30)


def test_the_host_s_variable_has_no_effect_on_a_chip(caplog: pytest.LogCaptureFixture) -> None:
    assert on_chip(environ={"VLLM_CPU_KVCACHE_SPACE": "1"}) == on_chip()
    assert "VLLM_CPU_KVCACHE_SPACE 1 has no effect" in caplog.text
