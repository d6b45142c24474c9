"""Requests through real vLLM on the arithmetic device: the same tokens however a request was scheduled."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from .engine import Engine, expected, greedy

Make = Callable[..., Engine]

PROMPTS = [[3, 4], [50, 60, 20], list(range(3, 63)), [7] * 40, [9, 9]]


@pytest.fixture(scope="module")
def engine(make_engine: Make) -> Engine:
    return make_engine()


def test_answers_by_hand(engine: Engine) -> None:
    # 3 + (3 + 2*4) = 14; 3 + (11 + 3*14) = 56; 3 + (53 + 4*56) mod 61 = 3 + 33
    assert engine.tokens_of([3, 4], greedy(3)) == [14, 56, 36]


def test_each_of_a_batch_as_if_alone(engine: Engine) -> None:
    outputs = engine.generate(PROMPTS, greedy(20))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(p, 20) for p in PROMPTS]


@pytest.mark.parametrize("steps", [1, 3, 7])
def test_joined_late(engine: Engine, steps: int) -> None:
    engine.add("first", [50, 51, 52], greedy(12))
    engine.step(steps)
    engine.add("late", [3, 4], greedy(8))
    engine.finish()
    assert engine.tokens["first"] == expected([50, 51, 52], 12)
    assert engine.tokens["late"] == expected([3, 4], 8)


def test_a_prefix_hit_starts_in_the_middle(engine: Engine) -> None:
    prompt = [(7 * i) % 60 + 3 for i in range(50)]
    cold, warm = engine.one(prompt, greedy()), engine.one(prompt, greedy())
    assert warm.num_cached_tokens == 48
    assert list(cold.outputs[0].token_ids) == list(warm.outputs[0].token_ids) == expected(prompt, 8)


def test_an_aborted_request_leaves_its_neighbour_alone(engine: Engine) -> None:
    engine.add("stays", [5, 6, 7], greedy(10))
    engine.add("leaves", [8, 9], greedy(50))
    engine.step(3)
    engine.core.abort_request(["leaves"])
    engine.finish()
    assert engine.tokens["stays"] == expected([5, 6, 7], 10)
    assert engine.worker.runner.state.num_free_places == 3  # the last one to finish leaves with the next step
    engine.tokens_of([3], greedy(1))
    assert engine.worker.runner.state.num_requests == 1


def test_stops_at_a_token_and_at_a_string(engine: Engine) -> None:
    by_token = engine.one([3, 4], greedy(stop_token_ids=[56])).outputs[0]
    by_text = engine.one([3, 4], greedy(stop=["w56"])).outputs[0]
    assert (list(by_token.token_ids), by_token.stop_reason) == ([14, 56], 56)
    assert (list(by_text.token_ids), by_text.stop_reason) == ([14, 56], "w56")


def test_up_to_the_model_s_length(engine: Engine) -> None:
    output = engine.one([7] * 120, greedy(50)).outputs[0]
    assert list(output.token_ids) == expected([7] * 120, 8)
    assert output.finish_reason == "length"


def test_chunks_beside_decoding_rows(make_engine: Make) -> None:
    engine = make_engine(options={"chunk_tokens": 16})
    engine.add("short", [5, 6], greedy(12))
    engine.step(2)
    long = [(11 * i) % 60 + 3 for i in range(100)]
    engine.add("long", long, greedy(6))
    # 100 tokens in chunks of 16 need seven steps; the short one gets a token in each of them.
    engine.step(6)
    assert "long" not in engine.tokens
    assert len(engine.tokens["short"]) == 8
    engine.finish()
    assert engine.tokens["short"] == expected([5, 6], 12)
    assert engine.tokens["long"] == expected(long, 6)


def test_a_step_holds_every_decode_row_and_one_chunk_of_prompts(make_engine: Make) -> None:
    engine = make_engine(options={"chunk_tokens": 16})
    engine.add("a", [5, 6], greedy(20))
    engine.add("b", [7] * 10, greedy(20))
    engine.add("c", [8] * 30, greedy(20))
    assert engine.schedules(5) == [
        {"a": 2, "b": 10, "c": 4},
        {"a": 1, "b": 1, "c": 16},
        {"a": 1, "b": 1, "c": 10},
        {"a": 1, "b": 1, "c": 1},
        {"a": 1, "b": 1, "c": 1},
    ]


def test_preempted_and_computed_again(make_engine: Make) -> None:
    engine = make_engine(num_gpu_blocks_override=12, max_model_len=128)
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, greedy(40))
    most = 0
    while engine.core.has_unfinished_requests():
        engine.step()
        most = max([most, *(request.num_preemptions for request in engine.scheduler.requests.values())])
    assert most > 0, "the cache was large enough; the test tests nothing"
    assert [engine.tokens[str(index)] for index in range(len(PROMPTS))] == [expected(p, 40) for p in PROMPTS]


def test_one_block_per_sequence(make_engine: Make) -> None:
    engine = make_engine(block_size=128, options={"chunk_tokens": 16})
    outputs = engine.generate(PROMPTS, greedy(20))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(p, 20) for p in PROMPTS]


@pytest.fixture(scope="module")
def crowded(make_engine: Make) -> Engine:
    return make_engine(num_gpu_blocks_override=12, options={"chunk_tokens": 32})


@pytest.fixture(scope="module")
def slots(make_engine: Make) -> Engine:
    return make_engine(options={"backend": "arithmetic-slots"}, max_num_seqs=3)


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_the_tokens_of_each_request_alone(crowded: Engine, seed: int) -> None:
    """Requests of all lengths join when they like and leave when they like, in a cache that is too small for them."""
    chance = Random(seed)
    asked = {f"{seed}-{i}": ([chance.randrange(64) for _ in range(chance.randint(1, 70))]) for i in range(24)}
    lengths = {name: chance.randint(1, 40) for name in asked}
    waiting, left = list(asked), set()
    while waiting or crowded.core.has_unfinished_requests():
        for _ in range(min(len(waiting), chance.randrange(3))):
            name = waiting.pop()
            crowded.add(name, asked[name], greedy(lengths[name]))
        crowded.step()
        if chance.random() < 0.1:
            left.add(leaving := chance.choice(list(asked)))
            crowded.core.abort_request([leaving])
            waiting = [name for name in waiting if name != leaving]
    for name, prompt in asked.items():
        tokens = crowded.tokens.get(name, [])
        assert tokens == expected(prompt, len(tokens))
        assert name in left or len(tokens) == lengths[name]
    assert crowded.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 11


class TestSlots:
    """A device that neither mixes nor splits, and loses a live row that a decode leaves out."""

    @pytest.fixture
    def engine(self, slots: Engine) -> Engine:
        return slots

    def test_more_requests_than_slots(self, engine: Engine) -> None:
        outputs = engine.generate(PROMPTS * 2, greedy(20))
        assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(p, 20) for p in PROMPTS] * 2

    def test_there_is_one_for_each_sequence_whatever_the_host_has_free(
        self, make_engine: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("neuronserve.neuron_worker.memory.free_bytes", lambda: 0)
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        engine = make_engine(options={"backend": "arithmetic-slots"}, max_num_seqs=3, kv_cache_memory_bytes=1 << 20)
        assert engine.worker.num_blocks == 1 + 3

    def test_a_prompt_waits_for_its_turn_not_for_the_others_to_end(self, engine: Engine) -> None:
        engine.add("a", [5, 6], greedy(30))
        engine.step(4)
        engine.add("b", [7, 8], greedy(30))
        engine.add("c", [9, 9], greedy(30))
        # Prompt of b, a decode of both, prompt of c, a decode of all.
        lengths = []
        for _ in range(4):
            engine.step()
            lengths.append(tuple(len(engine.tokens.get(name, ())) for name in "abc"))
        assert lengths == [(4, 1, 0), (5, 2, 0), (5, 2, 1), (6, 3, 2)]
        engine.finish()
        assert [engine.tokens[name] for name in "abc"] == [expected(p, 30) for p in ([5, 6], [7, 8], [9, 9])]

    def test_its_decodes_are_not_sent_as_if_they_were_new(self, engine: Engine) -> None:
        """A row that sat out a prompt's step must not come back with a copy of all its tokens."""
        copies = []
        schedule = engine.scheduler.schedule
        engine.scheduler.schedule = lambda *a, **k: _noting(copies, schedule(*a, **k))  # type: ignore[method-assign]
        engine.add("a", [5, 6], greedy(6))
        engine.step(2)
        engine.add("b", [7, 8], greedy(6))
        engine.finish()
        engine.scheduler.schedule = schedule  # type: ignore[method-assign]
        assert copies == []


def _noting(copies: list[str], output: Any) -> Any:
    copies += output.scheduled_cached_reqs.all_token_ids
    return output
