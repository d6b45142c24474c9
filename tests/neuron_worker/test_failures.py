"""A device that fails: its requests end with an error, the others are served, and the engine lives on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from neuronserve.neuron_worker.device.arithmetic import ArithmeticDevice
from neuronserve.neuron_worker.device.errors import DeviceError, DeviceLost
from neuronserve.neuron_worker.revival import EngineGivesUp, Revival
from neuronserve.neuron_worker.runner import _on_device

from .engine import Engine, expected, fail_loads, greedy, note_pauses

PROMPT = [(7 * i) % 60 + 3 for i in range(40)]


@pytest.fixture(params=["arithmetic", "arithmetic-slots"])
def engine(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(options={"backend": request.param}, max_num_seqs=2)


def fail_once(engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The next call of the device raises; the ones after it do not."""

    def run(device: ArithmeticDevice, batch: Any) -> Any:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(ArithmeticDevice, "run", run)


@pytest.mark.parametrize("error", [DeviceError("out of order"), DeviceLost("gone")], ids=lambda e: type(e).__name__)
def test_running_requests_end_and_waiting_ones_are_served(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, error: DeviceError
) -> None:
    engine.add("a", PROMPT, greedy(20))
    engine.add("b", [3, 4], greedy(20))
    engine.add("waits", [5, 6], greedy(8))
    engine.step(5)
    fail_once(engine, monkeypatch, error)
    engine.finish()

    assert engine.reasons == {"a": "error", "b": "error", "waits": "length"}
    assert engine.tokens["waits"] == expected([5, 6], 8)
    assert engine.tokens["a"] == expected(PROMPT, 20)[: len(engine.tokens["a"])]
    assert engine.worker.neuronserve_metrics()["failed_steps"] == 1


def test_no_prefix_of_a_failed_step_is_used_again(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    fail_once(engine, monkeypatch, DeviceError("out of order"))
    engine.add("fails", PROMPT, greedy(5))
    engine.finish()

    again = engine.one(PROMPT, greedy(5))
    assert engine.reasons["fails"] == "error"
    assert again.num_cached_tokens == 0
    assert list(again.outputs[0].token_ids) == expected(PROMPT, 5)


def test_a_lost_device_is_replaced(make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    before = engine.worker.runner.device
    fail_once(engine, monkeypatch, DeviceLost("gone"))
    engine.add("fails", PROMPT, greedy(5))
    engine.finish()

    assert engine.tokens_of([3, 4], greedy(3)) == expected([3, 4], 3)
    assert engine.worker.runner.device is not before


def test_a_backends_defect_in_this_process_ends_the_step_and_the_model_is_loaded_anew(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = engine.worker.runner.device
    engine.add("a", PROMPT, greedy(20))
    engine.add("b", [3, 4], greedy(20))
    engine.add("waits", [5, 6], greedy(8))
    engine.step(5)
    fail_once(engine, monkeypatch, ValueError("a register fell off"))
    engine.finish()

    assert engine.reasons == {"a": "error", "b": "error", "waits": "length"}
    assert engine.tokens["waits"] == expected([5, 6], 8)
    assert engine.worker.runner.device is not before


def test_a_backends_defect_while_copying_blocks_is_a_lost_device() -> None:
    def copy_blocks(pairs: list[tuple[int, int]]) -> None:
        raise IndexError(f"no block {pairs[0][1]}")

    with pytest.raises(DeviceLost, match="the device's backend failed: IndexError: no block 7"):
        _on_device(copy_blocks, [(1, 7)])


def test_requests_wait_while_a_restart_is_tried_again(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    pauses = note_pauses(engine)
    fail_once(engine, monkeypatch, DeviceLost("gone"))
    engine.add("first", PROMPT, greedy(5))
    engine.finish()
    fail_loads(monkeypatch, 2)
    engine.add("second", [3, 4], greedy(5))
    engine.finish()

    assert engine.reasons == {"first": "error", "second": "length"}
    assert engine.tokens["second"] == expected([3, 4], 5)
    assert pauses == [0, 1, 4]


def test_a_device_that_does_not_come_back_ends_the_engine(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(options={"device_restarts": 2})
    note_pauses(engine)
    fail_once(engine, monkeypatch, DeviceLost("gone"))
    engine.add("first", PROMPT, greedy(5))
    engine.finish()
    fail_loads(monkeypatch, 2)
    assert engine.reasons == {"first": "error"}

    engine.add("second", [3, 4], greedy(5))
    with pytest.raises(EngineGivesUp, match=r"2 attempts .* The last reason: still gone"):
        engine.finish()


def test_steps_that_never_work_use_the_attempts_up_and_one_that_does_gives_them_back() -> None:
    revival = Revival(ArithmeticDevice, 2, pause=lambda _: None)
    for _ in range(3):
        revival.revive("gone")
        revival.revive("gone")
        revival.worked()
    revival.revive("gone")
    revival.revive("gone")
    with pytest.raises(EngineGivesUp, match="The last reason: died in every step"):
        revival.revive("died in every step")


def test_what_the_machine_lacks_for_a_moment_is_tried_again() -> None:
    failures = [OSError("too many open files"), MemoryError("of the host")]

    def restart() -> ArithmeticDevice:
        if failures:
            raise failures.pop(0)
        return ArithmeticDevice()

    assert isinstance(Revival(restart, 3, pause=lambda _: None).revive("gone"), ArithmeticDevice)
    failures += [OSError("too many open files")] * 2
    with pytest.raises(EngineGivesUp, match="The last reason: OSError: too many open files"):
        Revival(restart, 2, pause=lambda _: None).revive("gone")
