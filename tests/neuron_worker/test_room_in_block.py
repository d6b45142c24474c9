"""Slots that are granted without asking vLLM's manager: its blocks, and what it caches, must come out the same."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from neuronserve.neuron_worker.scheduler import RoomInBlock

if TYPE_CHECKING:
    from .engine import Engine

BLOCK_SIZE, NUM_BLOCKS, LONGEST = 4, 24, 64
init_none_hash(sha256)


def a_manager() -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.uint8)
    config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layers"], spec)])
    return KVCacheManager(config, LONGEST, scheduler_block_size=BLOCK_SIZE, hash_block_size=BLOCK_SIZE)


def a_request(name: int, prompt: list[int]) -> Request:
    params = SamplingParams(max_tokens=LONGEST)
    hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
    return Request(str(name), prompt, params, None, block_hasher=hasher)


class World:
    """One manager and its requests, driven as the scheduler drives them."""

    def __init__(self, *, asks_first: bool) -> None:
        self.manager = a_manager()
        self.ask: Any = RoomInBlock(self.manager, BLOCK_SIZE) if asks_first else self.manager.allocate_slots
        self.requests: list[Request] = []
        self.preempted: list[Request] = []
        self.num_made = 0

    def join(self, prompt: list[int], chunk: int) -> object:
        self.num_made += 1
        return self._admit(a_request(self.num_made, prompt), chunk)

    def _admit(self, request: Request, chunk: int) -> object:
        hit, num_hit = self.manager.get_computed_blocks(request)[:2]
        count = min(chunk, request.num_tokens - num_hit)
        given = self.ask(
            request, count, num_new_computed_tokens=num_hit, new_computed_blocks=hit, num_lookahead_tokens=0
        )
        if given is None:
            return None
        request.num_computed_tokens, request.status = num_hit + count, RequestStatus.RUNNING
        self.requests.append(request)
        return given.get_block_ids()

    def advance(self, index: int, chunk: int, token: int) -> object:
        """A chunk of its prompt, or the token that it got last."""
        request = self.requests[index]
        if request.num_computed_tokens == request.num_tokens:
            request.append_output_token_ids(token)
        count = min(chunk, request.num_tokens - request.num_computed_tokens)
        given = self.ask(request, count, num_lookahead_tokens=0)
        if given is None:
            return None
        request.num_computed_tokens += count
        return given.get_block_ids(allow_none=True)

    def leave(self, index: int) -> None:
        self.manager.free(self.requests.pop(index))

    def preempt(self, index: int) -> None:
        request = self.requests.pop(index)
        self.manager.free(request)
        request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
        self.preempted.append(request)

    def resume(self, chunk: int) -> object:
        """What it had written may be in the cache still; without room for it, it waits on."""
        request = self.preempted[0]
        given = self._admit(request, chunk)
        if given is not None:
            self.preempted.remove(request)
        return given

    def state(self) -> object:
        cached = [
            len(self.manager.get_computed_blocks(a_request(-1, list(r.all_token_ids)))[0].blocks[0])
            for r in self.requests
        ]
        blocks = [self.manager.get_block_ids(request.request_id) for request in self.requests]
        return blocks, cached, self.manager.block_pool.get_num_free_blocks()


@pytest.mark.parametrize("seed", range(20))
def test_a_manager_that_is_asked_less_gives_and_caches_the_same(seed: int) -> None:
    chance = random.Random(seed)
    asked, spared = World(asks_first=False), World(asks_first=True)
    prompts = [[chance.randrange(9) for _ in range(chance.randrange(1, 20))] for _ in range(4)]
    for _ in range(150):
        running, draw = len(asked.requests), chance.random()
        chunk = chance.randrange(1, 8)
        if not running or draw < 0.1:
            prompt = [*chance.choice(prompts), chance.randrange(9)]
            assert spared.join(prompt, chunk) == asked.join(prompt, chunk)
        elif draw < 0.15 or asked.requests[0].num_tokens >= LONGEST - 8:
            index = 0 if asked.requests[0].num_tokens >= LONGEST - 8 else chance.randrange(running)
            asked.leave(index)
            spared.leave(index)
        elif draw < 0.2:
            index = chance.randrange(running)
            asked.preempt(index)
            spared.preempt(index)
        elif draw < 0.3 and asked.preempted:
            assert spared.resume(chunk) == asked.resume(chunk)
        else:
            index, token = chance.randrange(running), chance.randrange(9)
            assert spared.advance(index, chunk, token) == asked.advance(index, chunk, token)
        assert spared.state() == asked.state()


def test_vllm_is_asked_when_a_block_gets_full_or_begins() -> None:
    world = World(asks_first=True)
    asked: list[int] = []
    allocate = world.ask._allocate
    world.ask._allocate = lambda request, *rest, **more: (
        asked.append(request.num_tokens) or allocate(request, *rest, **more)
    )
    world.join([1, 2, 3, 4, 5], 8)
    for token in range(8):
        world.advance(0, 1, token)
    assert asked == [5, 8, 9, 12, 13]  # tokens known: the prompt, then the last and the first of each block


def test_a_request_that_waits_is_vllms_to_admit() -> None:
    """A session that goes on: its first tokens fit in its block, all of them in no cache."""
    world = World(asks_first=True)
    world.join([1, 2, 3, 4, 5], 8)
    world.join(list(range(60)), 60)
    session = world.requests[0]
    session.status = RequestStatus.WAITING
    session.append_output_token_ids(list(range(200)))
    assert world.ask(session, 1, full_sequence_must_fit=True) is None


def test_the_scheduler_asks_it_first(make_engine: Callable[..., Engine]) -> None:
    assert isinstance(make_engine().scheduler.kv_cache_manager.allocate_slots, RoomInBlock)


def test_drafts_may_be_taken_back_so_vllm_is_asked(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(speculative_model="ngram", num_speculative_tokens=3)
    assert not isinstance(engine.scheduler.kv_cache_manager.allocate_slots, RoomInBlock)


def test_vllm_does_not_look_first() -> None:
    """Else `RoomInBlock` can go: this counts the functions it calls to give nothing."""
    world, called = World(asks_first=False), list[str]()
    world.join([1, 2, 3, 4, 5], 8)
    world.requests[0].append_output_token_ids(6)
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    try:
        world.ask(world.requests[0], 1, num_lookahead_tokens=0)
    finally:
        sys.setprofile(None)
    assert len(called) > 10, called


def test_another_kind_of_cache_is_asked_always() -> None:
    def a_cache(*specs: KVCacheSpec) -> KVCacheConfig:
        return KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec([f"layers {i}"], spec) for i, spec in enumerate(specs)])

    full = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.uint8)
    window = SlidingWindowSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype=torch.uint8, sliding_window=8)
    assert RoomInBlock.is_plain(a_cache(full), BLOCK_SIZE)
    assert not RoomInBlock.is_plain(a_cache(window), BLOCK_SIZE)
    assert not RoomInBlock.is_plain(a_cache(full, full), BLOCK_SIZE)
    assert not RoomInBlock.is_plain(a_cache(full), 2 * BLOCK_SIZE)
