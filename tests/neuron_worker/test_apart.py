"""Prompts and decode rows in separate steps, on block-cached devices of several abilities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from neuronserve.neuron_worker.device import arithmetic, registry
from neuronserve.neuron_worker.device.base import Capabilities

from .engine import Engine, expected, greedy

APART = replace(arithmetic.CAPABILITIES, name="apart", mixes_prefill_and_decode=False, prompts_per_prefill=2)
WHOLE = replace(APART, splits_prompts=False)
CLINGING = replace(APART, name="clinging", kv_layout="slots", all_live_rows_in_decode=True)

PROMPTS = [[3, 4], [50, 60, 20], list(range(3, 63)), [7] * 40, [9, 9]]


@pytest.fixture
def engine_of(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """An engine on the arithmetic device with these capabilities."""

    def make(capabilities: Capabilities, **arguments: object) -> Engine:
        backend = registry._Backend(".arithmetic", capabilities.name.upper(), "ArithmeticDevice")
        monkeypatch.setitem(registry._BACKENDS, capabilities.name, backend)
        monkeypatch.setattr(arithmetic, backend.capabilities, capabilities, raising=False)
        options = {"backend": capabilities.name, "chunk_tokens": 16 if capabilities.splits_prompts else None}
        options = {key: value for key, value in options.items() if value is not None}
        return make_engine(options=options, **arguments)

    return make


@pytest.mark.parametrize("capabilities", [APART, WHOLE, CLINGING], ids=["apart", "whole", "clinging"])
def test_each_of_a_batch_as_if_alone(engine_of: Callable[..., Engine], capabilities: Capabilities) -> None:
    outputs = engine_of(capabilities).generate(PROMPTS * 2, greedy(20))
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(p, 20) for p in PROMPTS * 2]


@pytest.mark.parametrize("capabilities", [APART, WHOLE], ids=["apart", "whole"])
def test_an_exhausted_cache_preempts_and_goes_on(engine_of: Callable[..., Engine], capabilities: Capabilities) -> None:
    engine = engine_of(capabilities, num_gpu_blocks_override=10)
    for index, prompt in enumerate(PROMPTS):
        engine.add(str(index), prompt, greedy(40))
    preempted = 0
    while engine.core.has_unfinished_requests():
        engine.step()
        preempted = max([preempted, *(r.num_preemptions for r in engine.scheduler.requests.values())])
    assert preempted > 0, "the cache was large enough; the test tests nothing"
    assert [engine.tokens[str(index)] for index in range(len(PROMPTS))] == [expected(p, 40) for p in PROMPTS]


def test_steps_alternate_and_hold_as_many_prompts_as_a_call_may(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(APART)
    engine.add("a", [5, 6], greedy(30))
    engine.step(3)
    for name in "bcd":
        engine.add(name, [7, 8], greedy(30))
    engine.add("long", [7] * 40, greedy(30))
    lengths = []
    for _ in range(4):
        engine.step()
        lengths.append("".join(str(len(engine.tokens.get(name, ()))) for name in "abcd"))
    # Two prompts, a decode of three rows, one prompt (the fourth place is the last one free), a decode of four.
    assert lengths == ["3110", "4220", "4221", "5332"]
    engine.finish()
    assert engine.tokens["long"] == expected([7] * 40, 30)


def test_chunks_and_decodes_alternate(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(APART)
    engine.add("a", [5, 6], greedy(30))
    engine.step(3)
    engine.add("long", [7] * 40, greedy(30))  # chunks of 16, 16 and 8
    lengths = []
    for _ in range(6):
        engine.step()
        lengths.append((len(engine.tokens["a"]), len(engine.tokens.get("long", ()))))
    assert lengths == [(3, 0), (4, 0), (4, 0), (5, 0), (5, 1), (6, 2)]
    engine.finish()


def test_a_half_read_prompt_is_finished_before_a_decode_would_lose_it(engine_of: Callable[..., Engine]) -> None:
    engine = engine_of(CLINGING)
    engine.add("a", [5, 6], greedy(30))
    engine.step(3)
    engine.add("long", [7] * 40, greedy(30))
    lengths = []
    for _ in range(4):
        engine.step()
        lengths.append((len(engine.tokens["a"]), len(engine.tokens.get("long", ()))))
    assert lengths == [(3, 0), (3, 0), (3, 1), (4, 2)]
    engine.finish()
    assert engine.tokens["long"] == expected([7] * 40, 30)
