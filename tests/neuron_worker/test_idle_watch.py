"""Who waits for whom: steps, looks at the idle device, and the end of the worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from neuronserve.neuron_worker.idle_watch import IdleWatch

PATIENCE = 60.0


class Looks:
    """Looks that are counted, may be held up, and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.looked, self.may_go_on, self.given_up = threading.Event(), threading.Event(), threading.Event()
        self.may_go_on.set()
        self.watch = IdleWatch(self.look, self.given_up.set, period=0.001)

    def look(self) -> None:
        self.looked.set()
        self.may_go_on.wait(PATIENCE)
        if self.error is not None:
            raise self.error


@pytest.fixture
def looks() -> Iterator[Looks]:
    looks = Looks()
    yield looks
    looks.may_go_on.set()
    assert looks.watch.stop()


def test_no_look_in_a_step(looks: Looks) -> None:
    with looks.watch.step():
        looks.looked.clear()
        assert not looks.looked.wait(0.1)
    assert looks.looked.wait(PATIENCE)


def test_a_step_waits_for_a_look(looks: Looks) -> None:
    looks.may_go_on.clear()
    looks.looked.clear()
    assert looks.looked.wait(PATIENCE)
    stepped = threading.Event()

    def step() -> None:
        with looks.watch.step():
            stepped.set()

    thread = threading.Thread(target=step)
    thread.start()
    assert not stepped.wait(0.1)
    looks.may_go_on.set()
    assert stepped.wait(PATIENCE)
    thread.join()


def test_no_look_after_the_stop(looks: Looks) -> None:
    assert looks.watch.stop()
    looks.looked.clear()
    assert not looks.looked.wait(0.1)
    assert not looks.given_up.is_set()


def test_what_cannot_be_mended_is_given_up_once() -> None:
    looks = Looks(RuntimeError("no device"))
    assert looks.given_up.wait(PATIENCE)
    assert looks.watch.stop()
    with looks.watch.step():  # free for the request that will end in the error
        pass
