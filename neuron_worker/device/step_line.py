"""A step's request and its reply: a few numbers in the head of the shared memory, and a bell that wakes the other end.

    the caller's end:   send(REQUEST, ...) ──▶      ──▶ receive(REPLY)
    the device's end:   receive(REQUEST) ──▶ run ──▶ send(REPLY, ...)

A step sends a whole model through the processor's caches; what an exchange touches afterwards, the kernel's part of it
included, comes from memory. A counter of the kernel's touches less than a message in a socket: 20 us fewer of 210.

All else goes through the socket, and whoever waits for a bell looks at the socket too: it has the errors, the other
verbs, and the end of the other side.

Knows no process, no deadline and no backend. The rules in words: docs/device-protocol.md.
"""

from __future__ import annotations

import math
import os
import select
import socket
import struct
import sys
from typing import Any

from .step_memory import HEAD_BYTES, SharedMemory
from .wire import ChannelClosed

_RUNG = (1).to_bytes(8, sys.byteorder)  # what an eventfd adds to its counter


class Numbers:
    """Little-endian numbers at a place in the head, behind the beats."""

    def __init__(self, offset: int, layout: str) -> None:
        whole = struct.Struct("<" + layout)
        assert 8 <= offset <= offset + whole.size <= HEAD_BYTES
        self.offset, self.pack_into, self.unpack_from = offset, whole.pack_into, whole.unpack_from


REQUEST = Numbers(8, "III")  # sequence, index of the shape in order of compilation, prompt_logprobs
REPLY = Numbers(24, "Iiid")  # sequence, rows of logits, alternatives per score (-1: none), seconds


class Bell:
    """Two descriptors: what is rung at one end is heard at the other. A counter of the kernel's, or else a pipe."""

    def __init__(self) -> None:
        if hasattr(os, "eventfd"):
            self.hears = self.rings = os.eventfd(0)
        else:
            self.hears, self.rings = os.pipe()

    def close(self) -> None:
        for descriptor in {self.hears, self.rings}:
            os.close(descriptor)


class StepLine:
    """One end. `beside`: the socket that is looked at too. `tick`: seconds after which a wait raises TimeoutError."""

    def __init__(
        self, memory: SharedMemory, hears: int, rings: int, beside: socket.socket, tick: float | None = None
    ) -> None:
        self._head = memoryview(memory.buffer)[:HEAD_BYTES]
        self._hears, self._rings, self._beside = hears, rings, beside.fileno()
        self._tick = None if tick is None else math.ceil(1000 * tick)
        waiting = select.poll()
        waiting.register(hears, select.POLLIN)
        waiting.register(beside, select.POLLIN)
        self._poll = waiting.poll

    def send(self, numbers: Numbers, *values: float) -> None:
        numbers.pack_into(self._head, numbers.offset, *values)
        try:
            os.write(self._rings, _RUNG)
        except OSError as error:  # a pipe that nobody reads
            raise ChannelClosed(str(error)) from error

    def receive(self, numbers: Numbers) -> tuple[Any, ...] | None:
        """What was sent. None: the socket has something, which `Channel.receive` has."""
        ready = self._poll(self._tick)
        if not ready:
            raise TimeoutError
        events = dict(ready)
        said = events.get(self._beside, 0)
        if said and not said & select.POLLHUP:  # noise, where a bell rings too; an end may follow a reply that counts
            return None
        if self._hears in events and os.read(self._hears, 8):  # a pipe's end can be read too, and is empty
            return numbers.unpack_from(self._head, numbers.offset)
        return None

    def close(self) -> None:
        """The memory is not held any more."""
        self._head.release()
