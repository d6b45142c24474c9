"""A step's request and reply: numbers in shared memory, a bell, and the socket that is looked at beside it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from neuronserve.neuron_worker.device.step_line import REPLY, REQUEST, Bell, StepLine
from neuronserve.neuron_worker.device.step_memory import SharedMemory
from neuronserve.neuron_worker.device.wire import Channel, ChannelClosed, Status, Verb


@dataclass
class Ends:
    caller: StepLine
    device: StepLine
    caller_socket: socket.socket
    device_socket: socket.socket
    memory: SharedMemory


@pytest.fixture(params=["eventfd", "pipe"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """Both ends, each with its own view of the memory, as two processes have."""
    if request.param == "pipe":
        monkeypatch.delattr(os, "eventfd")
    requests, replies = Bell(), Bell()
    assert (requests.hears == requests.rings) == (request.param == "eventfd")
    ours, theirs = socket.socketpair()
    memory = SharedMemory.create()
    other = SharedMemory(os.dup(memory.descriptor))
    with ours, theirs:
        yield Ends(
            StepLine(memory, replies.hears, requests.rings, ours, tick=0.05),
            StepLine(other, requests.hears, replies.rings, theirs),
            ours,
            theirs,
            memory,
        )
    for thing in (requests, replies, memory, other):
        thing.close()


def test_a_step_goes_and_comes(ends: Ends) -> None:
    for sequence in (7, 8, 0xFFFFFFFF):
        ends.caller.send(REQUEST, sequence, 3, 20)
        assert ends.device.receive(REQUEST) == (sequence, 3, 20)
        ends.device.send(REPLY, sequence, 4, -1, 0.5)
        assert ends.caller.receive(REPLY) == (sequence, 4, -1, 0.5)


def test_a_request_is_heard_once(ends: Ends) -> None:
    ends.device.send(REPLY, 7, 4, -1, 0.5)
    ends.caller.receive(REPLY)
    with pytest.raises(TimeoutError):
        ends.caller.receive(REPLY)


def test_a_reply_is_waited_for(ends: Ends) -> None:
    late = threading.Timer(0.12, ends.device.send, (REPLY, 7, -1, 5, 0.25))
    late.start()
    with pytest.raises(TimeoutError):
        ends.caller.receive(REPLY)  # a tick
    for _ in range(200):  # of more ticks, on the slowest machine
        try:
            assert ends.caller.receive(REPLY) == (7, -1, 5, 0.25)
            break
        except TimeoutError:
            continue
    else:
        pytest.fail("the bell was not heard")
    late.join()


def test_beats_and_numbers_are_in_places_of_their_own(ends: Ends) -> None:
    ends.memory.beats[0] = 0xFFFFFFFFFFFFFFFF
    ends.caller.send(REQUEST, 1, 2, 3)
    ends.device.send(REPLY, 4, 5, 6, 7.5)
    assert ends.memory.beats[0] == 0xFFFFFFFFFFFFFFFF
    assert ends.device.receive(REQUEST) == (1, 2, 3)
    assert ends.caller.receive(REPLY) == (4, 5, 6, 7.5)


def test_a_message_in_the_socket_ends_the_wait_and_stays_there(ends: Ends) -> None:
    Channel(ends.device_socket).send(Verb.RUN, Status.FAILED, 7, b"{}")
    assert ends.caller.receive(REPLY) is None
    assert Channel(ends.caller_socket).receive() == (Verb.RUN, Status.FAILED, 7, b"{}")


def test_noise_in_the_socket_is_not_hidden_by_a_ring(ends: Ends) -> None:
    ends.device_socket.sendall(b"loading the compiler, please wait ...")
    ends.device.send(REPLY, 7, 4, -1, 0.5)
    assert ends.caller.receive(REPLY) is None


def test_so_does_the_end_of_the_other_side(ends: Ends) -> None:
    ends.device_socket.close()
    assert ends.caller.receive(REPLY) is None
    with pytest.raises(ChannelClosed):
        Channel(ends.caller_socket).receive()


def test_a_reply_that_came_before_the_end_is_not_lost(ends: Ends) -> None:
    ends.device.send(REPLY, 7, 4, -1, 0.5)
    ends.device_socket.close()
    assert ends.caller.receive(REPLY) == (7, 4, -1, 0.5)


def test_the_end_of_a_pipe_is_no_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the caller's process died: its ends of the pipe and of the socket are gone."""
    monkeypatch.delattr(os, "eventfd", raising=False)
    requests, replies = Bell(), Bell()
    ours, theirs = socket.socketpair()
    memory = SharedMemory.create()
    device = StepLine(memory, requests.hears, replies.rings, theirs)
    for descriptor in (requests.rings, replies.hears):
        os.close(descriptor)
    ours.close()
    assert device.receive(REQUEST) is None
    with pytest.raises(ChannelClosed):
        device.send(REPLY, 7, 4, -1, 0.5)
    device.close()
    memory.close()
    theirs.close()
    for descriptor in (requests.hears, replies.rings):
        os.close(descriptor)
