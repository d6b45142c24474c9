"""What the worker counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .engine import Engine, greedy


def test_a_run_counted_by_hand(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.generate([[3, 4], [5, 6, 7]], [greedy(4), greedy(4, logprobs=1)])
    found = engine.worker.neuronserve_metrics()

    # One step with both prompts (5 tokens in a bucket of 16), three with two decode rows.
    assert (found["steps"], found["device_calls"], found["failed_steps"]) == (4, 4, 0)
    assert {kind: counts["steps"] for kind, counts in found["kinds"].items()} == {"prefill": 1, "decode": 3, "mixed": 0}
    assert sum(found["kinds"]["decode"]["seconds"]["counts"]) == 3
    assert found["joined"]["sum"] == 2
    assert (found["prompt_tokens"], found["decode_tokens"]) == (5, 6)
    assert (found["rows_sampled_on_device"], found["rows_sampled_on_host"]) == (4, 4)
    assert found["num_shapes"] == len(engine.worker.config.plan.shapes)
    assert found["padding"]["total"] == {"real": 11, "padded": 11, "share": pytest.approx(0.5)}
    assert found["host_seconds"] == pytest.approx(found["step_seconds"] - found["device_seconds"])


def test_a_request_that_joins_a_running_one(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    engine.add("first", [3, 4], greedy(6))
    engine.step(2)
    engine.add("late", [5, 6], greedy(2))
    engine.finish()
    mixed = engine.worker.neuronserve_metrics()["kinds"]["mixed"]
    assert (mixed["steps"], mixed["extended"]) == (1, 1)


def test_is_read_by_collective_rpc(make_engine: Callable[..., Engine]) -> None:
    [found] = make_engine().llm.collective_rpc("neuronserve_metrics")
    assert found["steps"] == 0
