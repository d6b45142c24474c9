"""Messages between the two ends of a remote device: framing, verbs, and frozen types as JSON.

A message is a header of 16 bytes and a payload. Payloads are JSON, that of `draft` apart, which is a number: a step's
arrays lie in shared memory (`step_memory`). A step itself comes and goes without a message (`step_line`), its errors
apart. Nothing is pickled: what arrives can be misread, never executed.

Knows no process, no deadline and no backend. The rules in words: docs/device-protocol.md.
"""

from __future__ import annotations

import enum
import json
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

from . import errors
from .base import Capabilities, DeviceOptions, ModelFacts, StepShape
from .errors import DeviceError

PROTOCOL = 5
"""Raised with any change to a message, to a type that crosses, or to what lies where in shared memory."""

_MAGIC = b"NSDP"
_HEADER = struct.Struct("<4sBBHII")  # magic, verb, status, 0, sequence, bytes of payload
_HEADER_BYTES = _HEADER.size
_LARGEST_PAYLOAD = 1 << 24  # far above any real message, far below what would hurt to read

DRAFT_REQUEST = struct.Struct("<I")  # index of the shape of the step before


class Verb(enum.IntEnum):
    HELLO = 1
    LOAD = 2
    ALLOCATE = 3
    COMPILE = 4
    SEAL = 5
    RUN = 6
    COPY_BLOCKS = 7
    CLOSE = 8
    DRAFT = 9


class Status(enum.IntEnum):
    REQUEST = 0
    DONE = 1
    FAILED = 2  # the payload is an error


class ChannelClosed(EOFError):
    """The other end is gone."""


class BadMessage(ValueError):
    """What arrived is not of this protocol."""


Message = tuple[int, int, int, bytes]
"""verb, status, sequence (a reply carries its request's), payload"""


class Channel:
    """One end of the socket. Not thread-safe. A call that stands still for `tick` seconds raises TimeoutError."""

    def __init__(self, end: socket.socket, tick: float | None = None) -> None:
        self._socket = end
        self._received = b""
        if tick is not None:
            # The kernel's timeouts: Python's own would cost every message two more system calls.
            seconds = struct.pack("@ll", int(tick), int(tick % 1 * 1e6))
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)

    def send(self, verb: int, status: int, sequence: int, payload: bytes = b"") -> None:
        self._send(_HEADER.pack(_MAGIC, verb, status, 0, sequence, len(payload)) + payload)

    def _send(self, message: bytes) -> None:
        try:
            self._socket.sendall(message)
        except BlockingIOError as error:
            raise TimeoutError("a message could not be sent") from error
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> Message:
        """The next message. After a TimeoutError it may be called again: nothing is lost."""
        while len(self._received) < _HEADER_BYTES:
            self._fill(len(self._received) + 1)
            if not self._received.startswith(_MAGIC[: len(self._received)]):  # noise can be shorter than a header
                raise BadMessage(f"a message began with {self._received!r}")
        magic, verb, status, _, sequence, length = _HEADER.unpack_from(self._received)
        if magic != _MAGIC or length > _LARGEST_PAYLOAD:
            raise BadMessage(f"a message began with {self._received[:_HEADER_BYTES]!r}")
        end = _HEADER_BYTES + length
        if len(self._received) < end:
            self._fill(end)
        payload, self._received = self._received[_HEADER_BYTES:end], self._received[end:]
        return verb, status, sequence, payload

    @property
    def holds_more(self) -> bool:
        """Whether bytes of a next message came with the last one."""
        return bool(self._received)

    def close(self) -> None:
        self._socket.close()

    def _fill(self, count: int) -> None:
        while len(self._received) < count:
            try:
                chunk = self._socket.recv(max(4096, count))
            except BlockingIOError as error:
                raise TimeoutError from error
            except OSError as error:
                raise ChannelClosed(str(error)) from error
            if not chunk:
                raise ChannelClosed("the other end closed the connection")
            self._received = self._received + chunk if self._received else chunk


def to_json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values).encode()


def from_json(payload: bytes) -> dict[str, Any]:
    try:
        values = json.loads(payload or b"{}")
    except ValueError as error:
        raise BadMessage(f"a payload is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise BadMessage(f"a payload is {type(values).__name__}, not an object")
    return values


def shape_to_json(shape: StepShape) -> list[int]:
    return [int(size) for size in (shape.decode_rows, shape.decode_width, shape.prefill_tokens, shape.context)]


def shape_from_json(values: Sequence[int]) -> StepShape:
    return StepShape(*values)


def pairs_from_json(values: Iterable[Sequence[int]]) -> list[tuple[int, int]]:
    return [(int(source), int(target)) for source, target in values]


T = TypeVar("T", Capabilities, DeviceOptions, ModelFacts)


def type_to_json(value: Capabilities | DeviceOptions | ModelFacts) -> dict[str, Any]:
    return asdict(value)


def type_from_json(kind: type[T], values: object) -> T:
    """A frozen type of the protocol. Its sequences are tuples; JSON has lists."""
    names = {field.name for field in fields(kind)}
    if not isinstance(values, dict) or set(values) != names:
        raise BadMessage(f"{kind.__name__} has {sorted(names)}, the message has {values!r}")
    given: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return kind(**given)


def error_to_json(error: BaseException) -> dict[str, Any]:
    """An error as its class's names, the most special first, and its message."""
    if not isinstance(error, DeviceError):
        return {"types": ["DeviceError"], "message": f"the backend failed: {type(error).__name__}: {error}"}
    return {"types": [kind.__name__ for kind in type(error).__mro__], "message": str(error)}


def error_from_json(values: Mapping[str, Any]) -> DeviceError:
    """The first class of the error tree that is named; a backend's own subclass becomes the nearest one here."""
    for name in values.get("types", ()):
        kind = getattr(errors, str(name), None)
        if isinstance(kind, type) and issubclass(kind, DeviceError):
            return kind(str(values.get("message", "")))
    raise BadMessage(f"not an error: {values!r}")
