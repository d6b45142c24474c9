"""The device protocol with the device in another process, run by an interpreter of the user's choice.

    RemoteDevice ── messages (wire), steps (step_line), arrays (step_memory) ──▶ host.Host ──▶ the backend's Device

A verb waits for its reply until its deadline, and at most so many seconds of silence after the other process last gave
a sign of life. A process that died, hangs or talks garbage is killed; from then on every verb is `DeviceLost` until
`restart` has brought the device to where it was, its cache empty.

Knows no backend: what it can do comes with the greeting.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import numpy as np

from .base import Capabilities, DeviceOptions, DeviceOutput, DraftRequest, Int32, ModelFacts, PackedBatch, StepShape
from .draft_rows import no_draft, not_the_last
from .errors import DeviceError, DeviceLost, UncompiledShape
from .host_process import HostProcess
from .step_line import REPLY, REQUEST, Bell, StepLine
from .step_memory import SharedMemory, StepLimits, StepMemory, bytes_of
from .wire import (
    DRAFT_REQUEST,
    PROTOCOL,
    BadMessage,
    Channel,
    ChannelClosed,
    Status,
    Verb,
    error_from_json,
    from_json,
    shape_to_json,
    to_json,
    type_from_json,
    type_to_json,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

_TICK_SECONDS = 1.0  # how often a waiting client looks for signs of life
_REQUEST, _DONE, _RUN, _DRAFT = Status.REQUEST, Status.DONE, Verb.RUN, Verb.DRAFT  # looking them up is slow
DAY = 86400.0

_PREPARING = frozenset({Verb.HELLO, Verb.LOAD, Verb.ALLOCATE, Verb.COMPILE, Verb.SEAL})
_RAISED_BY = {
    **dict.fromkeys((Verb.LOAD, Verb.ALLOCATE, Verb.COMPILE, Verb.SEAL), "; device_prepare_timeout allows it more"),
    **dict.fromkeys((Verb.RUN, Verb.DRAFT), "; device_timeout allows it more"),
}
_NO_BEATS = np.zeros(1, np.uint64)


@dataclass(frozen=True)
class Deadlines:
    """Seconds until a verb's reply is given up, and of silence until a process is taken for a stopped one. Loading and
    compiling on a chip take hours and are rightly waited for; an SDK may keep Python's lock for minutes of them. Signs
    of life cannot tell a long compilation from one that hangs, so a day is the end of both."""

    start: float = 300.0
    load: float = DAY
    compile: float = DAY
    run: float = 120.0
    close: float = 10.0
    other: float = 60.0
    silence: float = 120.0
    long_silence: float = 1800.0

    @classmethod
    def asked(cls, step: float | None, prepare: float | None) -> Deadlines:
        """For steps, and for loading and compiling, that may take so long; None: the default. Silence is no shorter
        than a step, or it would be the deadline."""
        step, prepare = step or cls.run, prepare or cls.compile
        silences = {"silence": max(cls.silence, step), "long_silence": max(cls.long_silence, step)}
        return cls(load=prepare, compile=prepare, run=step, **silences)

    def of(self, verb: Verb) -> float:
        by_verb = {
            Verb.HELLO: self.start,
            Verb.LOAD: self.load,
            Verb.ALLOCATE: self.load,
            Verb.COMPILE: self.compile,
            Verb.SEAL: self.compile,  # where all graphs are compiled together
            Verb.RUN: self.run,
            Verb.DRAFT: self.run,
            Verb.CLOSE: self.close,
        }
        return by_verb.get(verb, self.other)

    def silence_of(self, verb: Verb) -> float:
        return self.long_silence if verb in _PREPARING else self.silence

    @property
    def shortest(self) -> float:
        return min(self.start, self.load, self.compile, self.run, self.other, self.silence, self.long_silence)


class RemoteDevice:
    """See `base.Device`. The process runs from construction until `close`."""

    def __init__(self, backend: str, device_python: str, deadlines: Deadlines | None = None) -> None:
        self.backend = backend
        self.device_python = device_python
        self.deadlines = deadlines or Deadlines()
        self._history: list[tuple[Callable[..., object], tuple[Any, ...]]] = []  # what a restart does again
        self._lost: str | None = None  # why, once it is
        self._closed = False
        self._sequence = 0
        self._limits: StepLimits | None = None
        self._steps: dict[StepShape, tuple[int, StepMemory]] = {}  # with the shape's index in order of compilation
        self._current: tuple[int, StepMemory | None] = (0, None)
        self._ran: StepMemory | None = None  # whose arrays are those of the last step
        self._last_check = (0.0, 0, 0.0)  # when, the beats then, seconds without another
        self._start()

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def pid(self) -> int:
        """Of the device's process, for reports."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._lost is None and not self._closed and self._process.is_alive

    def load(self, model_dir: str, options: DeviceOptions, draft_dir: str | None = None) -> ModelFacts:
        # The other process has the same working directory now, but need not keep it.
        draft_dir = None if draft_dir is None else os.path.abspath(draft_dir)
        arguments = (os.path.abspath(model_dir), options, draft_dir)
        facts = self._load(*arguments)
        self._history.append((RemoteDevice._load, arguments))
        return facts

    def allocate(self, num_blocks: int) -> None:
        self._allocate(int(num_blocks))
        self._history.append((RemoteDevice._allocate, (int(num_blocks),)))

    def compile(self, shape: StepShape) -> None:
        self._compile(shape)
        self._history.append((RemoteDevice._compile, (shape,)))

    def seal(self) -> None:
        self._seal()
        self._history.append((RemoteDevice._seal, ()))

    def run(self, batch: PackedBatch) -> DeviceOutput:
        index, step = self._current  # there is none when the device is lost or closed
        if step is None or step.shape is not batch.shape:
            self._check_usable()
            index, step = self._find(batch.shape)
        self._ran = None
        step.write(batch)
        self._sequence = sequence = self._sequence + 1 & 0xFFFFFFFF
        try:
            self._line.send(REQUEST, sequence, index, batch.prompt_logprobs)
            of_sequence, num_logits, num_scores, seconds = self._step_reply(sequence)
            if of_sequence != sequence:
                raise BadMessage(f"the reply is for message {of_sequence}")
            output = step.read(num_logits, num_scores, seconds)
        except BaseException as error:
            self._end_exchange(_RUN, error)
        self._ran = step
        return output

    def draft(self, batch: PackedBatch, request: DraftRequest) -> Int32:
        self._check_usable()
        if self._limits is None or not self._limits.num_drafts:
            raise no_draft()
        index, step = self._find(batch.shape)
        if step is not self._ran:
            raise not_the_last(batch.shape)
        step.write_request(request)
        self._exchange(_DRAFT, DRAFT_REQUEST.pack(index))
        return step.drafts

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._ask(Verb.COPY_BLOCKS, {"pairs": [(int(source), int(target)) for source, target in pairs]})

    def check(self) -> None:
        """Between two verbs, every second or so: `DeviceLost` when the process has ended or shows no sign of life."""
        self._check_usable()
        if not self._process.is_alive:
            self._lose("ended while idle")
        now, beats = time.monotonic(), int(self._beats[0])
        checked, seen, silent = self._last_check
        silent = 0.0 if beats != seen else silent + _passed(checked, now)
        self._last_check = now, beats, silent
        if silent >= self.deadlines.silence:
            self._lose(f"hung while idle: no sign of life for {self.deadlines.silence:g} s")

    def restart(self) -> None:
        """A new process that loads, allocates, compiles and seals what was asked of this device. The cache is empty."""
        self._release()
        self._start()
        for verb, arguments in self._history:
            verb(self, *arguments)

    def close(self) -> None:
        if self._closed:
            return
        patience = 0.0
        try:
            self._exchange(Verb.CLOSE, b"")
            patience = self.deadlines.close
        except DeviceError as error:
            logger.info("closing: %s", error)
        finally:
            self._closed = True
            self._release(patience)

    def _load(self, model_dir: str, options: DeviceOptions, draft_dir: str | None) -> ModelFacts:
        request = {"model_dir": model_dir, "options": type_to_json(options), "draft_dir": draft_dir}
        reply = self._ask(Verb.LOAD, request)
        try:
            facts = type_from_json(ModelFacts, reply)
        except BadMessage as error:
            self._lose(f"answered load with garbage: {error}")
        self._limits = StepLimits.of(options, facts, draft_dir)
        return facts

    def _allocate(self, num_blocks: int) -> None:
        self._ask(Verb.ALLOCATE, {"num_blocks": num_blocks})

    def _compile(self, shape: StepShape) -> None:
        self._check_usable()
        if self._limits is None:
            raise DeviceError(f"{shape} cannot be compiled before a model is loaded; call load first")
        num_bytes = bytes_of(shape, self._limits)
        self._memory.grow(num_bytes)
        request = {"shape": shape_to_json(shape), "index": self._num_compiled, "num_bytes": num_bytes}
        self._ask(Verb.COMPILE, request)
        self._steps[shape] = self._num_compiled, StepMemory(shape, self._limits, self._memory)
        self._num_compiled += 1

    def _seal(self) -> None:
        self._ask(Verb.SEAL, {})

    def _start(self) -> None:
        self._lost, self._closed = None, False
        self._limits, self._num_compiled = None, 0
        try:
            process, ends = self._open()
        except BaseException as error:
            self._lost = str(error)
            raise
        self._process, self._ends = process, ends
        self._beats = self._memory.beats
        self._last_check = (time.monotonic(), 0, 0.0)
        self._finalizer = weakref.finalize(self, _release, process, ends)
        self._greet()

    def _open(self) -> tuple[HostProcess, ExitStack]:
        """A process, and what is open here for it."""
        tick = min(_TICK_SECONDS, self.deadlines.shortest / 4)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ExitStack() as opened, theirs:  # ours alone stays open, or their end would never be seen
            self._channel = opened.enter_context(closing(Channel(ours, tick)))
            self._memory = opened.enter_context(closing(SharedMemory.create()))
            requests, replies = (opened.enter_context(closing(Bell())) for _ in range(2))
            line = StepLine(self._memory, replies.hears, requests.rings, ours, tick)
            self._line = opened.enter_context(closing(line))
            descriptors = {
                "--socket": theirs.fileno(),
                "--memory": self._memory.descriptor,
                "--hears": requests.hears,
                "--rings": replies.rings,
            }
            arguments = [word for name, descriptor in descriptors.items() for word in (name, str(descriptor))]
            process = HostProcess(self.device_python, arguments, tuple(descriptors.values()))
            return process, opened.pop_all()

    def _greet(self) -> None:
        try:
            reply = self._ask(Verb.HELLO, {"protocol": PROTOCOL, "backend": self.backend})
            if reply.get("protocol") != PROTOCOL:
                raise BadMessage(f"this side speaks protocol {PROTOCOL}, the other {reply.get('protocol')}")
            self._capabilities = type_from_json(Capabilities, reply.get("capabilities"))
        except BadMessage as error:
            self._lose(f"answered the greeting with garbage: {error}")
        except DeviceError as error:
            self._lost = self._lost or str(error)
            self._release()
            raise
        logger.info(
            "the %s device runs in process %d: %s, Python %s, numpy %s",
            *(self.backend, self.pid, self._process.python, reply.get("python"), reply.get("numpy")),
        )

    def _ask(self, verb: Verb, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            payload = to_json(request)
        except TypeError as error:
            raise DeviceError(f"{_name(verb)} has an option that is not plain data: {error}") from error
        reply = self._exchange(verb, payload)
        try:
            return from_json(reply)
        except BadMessage as error:
            self._lose(f"answered {_name(verb)} with garbage: {error}")

    def _exchange(self, verb: Verb, payload: bytes) -> bytes:
        """The reply's payload; a reported error raised as what it was there."""
        self._check_usable()
        self._sequence = sequence = self._sequence + 1 & 0xFFFFFFFF
        try:
            self._channel.send(verb, _REQUEST, sequence, payload)
            return self._reply_to(verb, sequence)
        except BaseException as error:
            self._end_exchange(verb, error)

    def _step_reply(self, sequence: int) -> tuple[Any, ...]:
        try:
            reply = self._line.receive(REPLY)
        except TimeoutError:  # one tick
            reply = self._wait_for(_RUN, partial(self._line.receive, REPLY))
        if reply is None:
            self._reply_to(_RUN, sequence)  # raises what it tells
            raise BadMessage("a step's reply came as a message")
        return reply

    def _reply_to(self, verb: Verb, sequence: int) -> bytes:
        of_verb, status, of_sequence, reply = self._wait_for(verb, self._channel.receive)
        if of_verb != verb or of_sequence != sequence:
            raise BadMessage(f"the reply is for verb {of_verb}, message {of_sequence}")
        if self._channel.holds_more:
            raise BadMessage("something follows the reply")
        if status != _DONE:
            raise error_from_json(from_json(reply))
        return reply

    def _end_exchange(self, verb: Verb, error: BaseException) -> NoReturn:
        """A reported error leaves the device as it was; any other end of an exchange loses it."""
        if isinstance(error, DeviceError):
            raise error
        if isinstance(error, ChannelClosed):
            self._lose(f"ended during {_name(verb)}")
        if isinstance(error, TimeoutError):
            self._lose(f"hung during {_name(verb)}: {error}")
        if isinstance(error, (BadMessage, struct.error)):
            self._lose(f"answered {_name(verb)} with garbage: {error}")
        self._abandon(f"was left alone during {_name(verb)}")  # its answer would be taken for the next one's
        raise error

    def _wait_for(self, verb: Verb, receive: Callable[[], T]) -> T:
        """What `receive` has, which raises TimeoutError at every tick without it."""
        deadline, silence = self.deadlines.of(verb), self.deadlines.silence_of(verb)
        seen, beats = time.monotonic(), int(self._beats[0])
        waited = silent = 0.0
        while True:
            try:
                return receive()
            except TimeoutError:  # one tick
                before, seen = seen, time.monotonic()
            passed = _passed(before, seen)
            waited += passed
            silent = silent + passed if int(self._beats[0]) == beats else 0.0
            beats = int(self._beats[0])
            if silent >= silence:
                raise TimeoutError(f"no sign of life for {silence:g} s")
            if waited >= deadline:
                raise TimeoutError(f"no answer within {deadline:g} s{_RAISED_BY.get(verb, '')}")

    def _find(self, shape: StepShape) -> tuple[int, StepMemory]:
        found = self._steps.get(shape)
        if found is None:
            raise UncompiledShape(f"{shape} was never compiled; compiled are {len(self._steps)} others")
        # Most steps have the shape of the one before: that one is found without hashing.
        if found[1].shape is shape:
            self._current = found
        return found

    def _check_usable(self) -> None:
        if self._closed:
            raise DeviceError("the device is closed")
        if self._lost is not None:
            raise DeviceLost(self._lost)

    def _lose(self, what: str) -> NoReturn:
        self._abandon(what)
        raise DeviceLost(self._lost)

    def _abandon(self, what: str) -> None:
        """Kill the process, whatever it does; every verb from here on says why."""
        # One that closed its end is about to exit, and its exit status tells more than our signal would.
        self._release(patience=1.0 if what.startswith("ended") else 0.0)
        self._lost = f"the device's process {self.pid} ({self._process.python}) {what}; {self._process.obituary()}"

    def _release(self, patience: float = 0.0) -> None:
        self._steps, self._current, self._ran = {}, (0, None), None
        self._beats = _NO_BEATS
        if self._finalizer.detach():
            _release(self._process, self._ends, patience)


def _passed(since: float, now: float) -> float:
    """Seconds between two looks at the other process. A pause of this one's own, as of a container that was frozen, is
    no silence of the other's."""
    return min(now - since, 5 * _TICK_SECONDS)


def _name(verb: Verb) -> str:
    return verb.name.lower()


def _release(process: HostProcess, ends: ExitStack, patience: float = 0.0) -> None:
    process.end(patience)
    ends.close()
