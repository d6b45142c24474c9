"""The device's process: messages in, calls of a backend, messages out. One client, one device, one call at a time.

Started by `remote` through `__main__`; ends when the client says so or is gone. While it lives a thread counts up
the first word of the shared memory, so that the client can tell a long compilation from a stopped process.

Knows no vLLM and no policy; which backend it runs is the client's word.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from . import registry
from .base import Device, DeviceOptions, DeviceOutput, ModelFacts
from .errors import DeviceError
from .step_line import REPLY, REQUEST, StepLine
from .step_memory import SharedMemory, StepLimits, StepMemory, bytes_of
from .wire import (
    DRAFT_REQUEST,
    PROTOCOL,
    BadMessage,
    Channel,
    ChannelClosed,
    Status,
    Verb,
    error_to_json,
    from_json,
    pairs_from_json,
    shape_from_json,
    to_json,
    type_from_json,
    type_to_json,
)

BEAT_SECONDS = 0.5
_DONE, _FAILED = int(Status.DONE), int(Status.FAILED)
_RUN, _DRAFT, _CLOSE = int(Verb.RUN), int(Verb.DRAFT), int(Verb.CLOSE)

Json = Mapping[str, Any]


class Host:
    def __init__(self, channel: Channel, line: StepLine, memory: SharedMemory) -> None:
        self._channel = channel
        self._line = line
        self._memory = memory
        self._device: Device | None = None
        self._limits: StepLimits | None = None
        self._options: DeviceOptions | None = None
        self._steps: list[StepMemory] = []  # by index of compilation
        self._output: DeviceOutput | None = None
        self._verbs: dict[int, Callable[[Json], Json]] = {
            Verb.HELLO: self._hello,
            Verb.LOAD: self._load,
            Verb.ALLOCATE: self._allocate,
            Verb.COMPILE: self._compile,
            Verb.SEAL: self._seal,
            Verb.COPY_BLOCKS: self._copy_blocks,
            Verb.CLOSE: self._close,
        }

    def serve(self) -> None:
        """Until the client closes the device or is gone."""
        while True:
            step = self._line.receive(REQUEST)
            if step is not None:
                self._serve_step(*step)
            elif self._serve_verb() == _CLOSE:
                return

    def _serve_step(self, sequence: int, index: int, prompt_logprobs: int) -> None:
        try:
            num_logits, num_scores, seconds = self._run(index, prompt_logprobs)
        except BadMessage:
            raise
        except (Exception, SystemExit) as error:
            self._channel.send(_RUN, _FAILED, sequence, _report(error))
        else:
            self._line.send(REPLY, sequence, num_logits, num_scores, seconds)
        self._output = None

    def _serve_verb(self) -> int:
        verb, _, sequence, payload = self._channel.receive()
        try:
            status, answer = _DONE, self._answer(verb, payload)
        except BadMessage:
            raise
        except (Exception, SystemExit) as error:  # a backend's tools may think that the process is theirs
            status, answer = _FAILED, _report(error)
        self._channel.send(verb, status, sequence, answer)
        return verb

    def _answer(self, verb: int, payload: bytes) -> bytes:
        if verb == _DRAFT:
            return self._draft(payload)
        if verb not in self._verbs:
            raise BadMessage(f"verb {verb} is not known")
        return to_json(self._verbs[verb](from_json(payload)))

    def _run(self, index: int, prompt_logprobs: int) -> tuple[int, int, float]:
        step = self._steps[index]
        # Kept until the reply is sent: freeing megabytes of logits takes longer than copying them.
        self._output = self._made().run(step.batch(prompt_logprobs))
        return step.publish(self._output)

    def _draft(self, payload: bytes) -> bytes:
        """The arrays of the step before are still in their places."""
        step = self._steps[DRAFT_REQUEST.unpack(payload)[0]]
        step.drafts[...] = self._made().draft(step.batch(0), step.draft_request)
        return b""

    def _hello(self, request: Json) -> Json:
        if request.get("protocol") != PROTOCOL:
            raise DeviceError(
                f"the server speaks protocol {request.get('protocol')}, the device's process {PROTOCOL}: "
                "the files changed under a running server; restart it"
            )
        self._device = registry.create(request["backend"])
        return {
            "protocol": PROTOCOL,
            "python": platform.python_version(),
            "numpy": np.__version__,
            "backends": list(registry.names()),
            "pid": os.getpid(),
            "capabilities": type_to_json(self._device.capabilities),
        }

    def _load(self, request: Json) -> Json:
        options = replace(type_from_json(DeviceOptions, request["options"]), across_processes=True)
        facts: ModelFacts = self._made().load(request["model_dir"], options, request["draft_dir"])
        self._limits = StepLimits.of(options, facts, request["draft_dir"])
        return type_to_json(facts)

    def _allocate(self, request: Json) -> Json:
        self._made().allocate(request["num_blocks"])
        return {}

    def _compile(self, request: Json) -> Json:
        shape = shape_from_json(request["shape"])
        if self._limits is None:
            raise DeviceError(f"{shape} cannot be compiled before a model is loaded")
        agreed = {"index": len(self._steps), "num_bytes": bytes_of(shape, self._limits)}
        if any(request[name] != value for name, value in agreed.items()):
            raise BadMessage(f"{shape} should come with {agreed}: {request}")
        self._made().compile(shape)
        self._memory.refresh()
        self._steps.append(StepMemory(shape, self._limits, self._memory))
        return {}

    def _seal(self, request: Json) -> Json:
        self._made().seal()
        return {}

    def _copy_blocks(self, request: Json) -> Json:
        self._made().copy_blocks(pairs_from_json(request["pairs"]))
        return {}

    def _close(self, request: Json) -> Json:
        if self._device is not None:
            self._device.close()
        return {}

    def _made(self) -> Device:
        if self._device is None:
            raise BadMessage("the first message is not a greeting")
        return self._device


def _report(error: BaseException) -> bytes:
    if not isinstance(error, DeviceError):
        traceback.print_exception(error)  # a backend's defect: the log has where
    return to_json(error_to_json(error))


def _beat(memory: SharedMemory) -> None:
    beats = memory.beats
    while True:
        beats[0] += 1
        time.sleep(BEAT_SECONDS)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="device", description="Runs a backend for the process that started this one.")
    parser.add_argument("--socket", type=int, required=True, help="file descriptor of a connected local socket")
    parser.add_argument("--memory", type=int, required=True, help="file descriptor of the shared memory")
    parser.add_argument("--hears", type=int, required=True, help="file descriptor of the bell for a step's request")
    parser.add_argument("--rings", type=int, required=True, help="file descriptor of the bell for its reply")
    given = parser.parse_args(arguments)
    # Not for what a backend starts in its turn: a compiler that held the socket would hide this process's end.
    for descriptor in vars(given).values():
        os.set_inheritable(descriptor, False)
    end = socket.socket(fileno=given.socket)
    memory = SharedMemory(given.memory)
    channel, line = Channel(end), StepLine(memory, given.hears, given.rings, end)
    threading.Thread(target=_beat, args=(memory,), daemon=True, name="beat").start()
    code = 0
    try:
        Host(channel, line, memory).serve()
    except ChannelClosed:
        pass
    except BadMessage as error:
        print(f"the client sent what is not of this protocol: {error}", file=sys.stderr)
        code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an SDK's threads or exit handlers may wait for ever; there is nothing left to save
