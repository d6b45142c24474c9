"""What a device must do, as checks a user can run where it serves: contract, exactness, faults.

A check takes a `Bench`, raises `Failed` (or a device's error) where the device is wrong and `Skipped` where its
capabilities say it cannot; what it gives is said beside it in the table. Here devices are held against themselves:
alone against together, whole against in pieces, before a fault against after it; in `answer_checks` against the model.
The developers' suite of the protocol is larger; this is its part that needs no
test code and compiles nothing but one plan.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from neuronserve.bucketing.pack import RowOutput, StepPacker
from neuronserve.bucketing.row import Row, int32

from .config import NeuronConfig
from .device.base import Device, Float32, StepShape, Want
from .device.errors import DeviceError, DeviceLost, LoadError, UncompiledShape
from .device.remote import RemoteDevice
from .reference import Reference
from .trial import Request, Trial

COUNT = 8  # tokens after each prompt
SILENCE = 10.0  # seconds, where a process is stopped on purpose


class Failed(AssertionError):
    """What the device did, against what it had to do."""


class Skipped(Exception):
    """Why the check says nothing of this device."""


@dataclass
class Bench:
    """One device, brought up; and how to make another."""

    config: NeuronConfig
    model_dir: str
    make: Callable[[], Device]
    trial: Trial
    prompts: Sequence[Sequence[int]]
    reference: Callable[[], Reference]  # raises `NoReference`

    @property
    def device(self) -> Device:
        return self.trial.device


Check = Callable[[Bench], str | None]


# -- contract


def plain_data(bench: Bench) -> None:
    """capabilities and facts are plain data"""
    json.dumps([asdict(bench.device.capabilities), asdict(bench.trial.facts)])
    _equal("capabilities", bench.device.capabilities, bench.config.capabilities)


def verbs_in_order(bench: Bench) -> None:
    """nothing works before a model is loaded"""
    device = bench.make()
    try:
        _refuses(DeviceError, lambda: device.allocate(4))
        _refuses(DeviceError, lambda: device.compile(bench.config.plan.shapes[0]))
    finally:
        device.close()


def missing_model(bench: Bench) -> None:
    """a missing directory is refused by its name"""
    device = bench.make()
    try:
        error = _refuses(LoadError, lambda: device.load("/no-model-here", bench.config.device_options()))
        if "no-model-here" not in str(error):
            raise Failed(f"the error does not name the directory: {error}")
    finally:
        device.close()


def sealed(bench: Bench) -> None:
    """after the seal nothing is compiled"""
    _refuses(UncompiledShape, lambda: bench.device.compile(_unknown_shape(bench)))


def unknown_shape(bench: Bench) -> None:
    """an uncompiled shape is refused, and the device serves on"""
    shape, plan = _unknown_shape(bench), bench.config.plan
    batch = StepPacker(plan.block_size, plan.prompts_per_call).prepare(shape)
    before = bench.trial.alone(bench.prompts[0], COUNT)
    _refuses(UncompiledShape, lambda: bench.device.run(batch))
    _equal("tokens after the refusal", bench.trial.alone(bench.prompts[0], COUNT), before)


def logits(bench: Bench) -> None:
    """logits are finite, one per token of the vocabulary"""
    found = _logits(bench)
    if found.shape != (1, bench.trial.facts.vocab_size) or found.dtype != np.float32 or not np.isfinite(found).all():
        raise Failed(f"logits of shape {found.shape}, {found.dtype}, {np.isfinite(found).mean():.0%} finite")


def likeliest(bench: Bench) -> None:
    """the device's greedy token is the likeliest of its logits"""
    if bench.device.capabilities.sampling != "per_step":
        raise Skipped("where tokens are drawn is compiled in")
    [token] = _read(bench, Want.TOKEN).tokens
    _equal("token", token, int(_logits(bench)[-1].argmax()))


def closed(bench: Bench) -> None:
    """closing twice is fine, and ends everything"""
    batch = StepPacker(bench.config.plan.block_size, bench.config.plan.prompts_per_call).prepare(
        bench.config.plan.shapes[0]
    )
    bench.device.close()
    bench.device.close()
    _refuses(DeviceError, lambda: bench.device.run(batch))


# -- exactness


def repeated(bench: Bench) -> None:
    """the same prompt twice"""
    _equal("tokens", bench.trial.alone(bench.prompts[0], COUNT), bench.trial.alone(bench.prompts[0], COUNT))


def joined_late(bench: Bench) -> None:
    """joined late, in a full batch"""
    trial, expected = bench.trial, _each_alone(bench)
    live: list[Request] = []
    for prompt in bench.prompts:
        live.append(trial.open(prompt))
        trial.read(live[-1])
        trial.advance(live)
    _finish(bench, live, expected)


def batched(bench: Bench) -> None:
    """all prompts in one step"""
    trial, expected = bench.trial, _each_alone(bench)
    live = [trial.open(prompt) for prompt in bench.prompts]
    trial.step([(request, len(request.tokens)) for request in live])
    _finish(bench, live, expected)


def left_early(bench: Bench) -> None:
    """a neighbour leaves, another takes its place"""
    trial, expected = bench.trial, _each_alone(bench)
    stays, leaves = trial.open(bench.prompts[0]), trial.open(bench.prompts[1])
    for request in (stays, leaves):
        trial.read(request)
    trial.advance([stays, leaves])
    trial.close(leaves)
    comes = trial.open(bench.prompts[2])
    trial.read(comes)
    _finish(bench, [stays, comes], [expected[0], expected[2]])


def chunked(bench: Bench) -> None:
    """a prompt in chunks"""
    if not bench.device.capabilities.splits_prompts:
        raise Skipped("takes prompts whole")
    expected = bench.trial.alone(bench.prompts[0], COUNT)
    for chunk in (1, 3):
        _equal(f"tokens in chunks of {chunk}", bench.trial.alone(bench.prompts[0], COUNT, chunk), expected)


def mixed(bench: Bench) -> None:
    """a prompt and a decode row in one call"""
    if not bench.config.plan.mixes:
        raise Skipped("computes them in separate calls")
    trial, expected = bench.trial, _each_alone(bench)
    first, second = trial.open(bench.prompts[0]), trial.open(bench.prompts[1])
    trial.read(first)
    trial.step([(first, 1), (second, len(second.tokens))])
    _finish(bench, [first, second], expected[:2])


def copied_blocks(bench: Bench) -> None:
    """copied cache blocks continue as the original"""
    if bench.device.capabilities.kv_layout != "blocks":
        raise Skipped("whole slots")
    trial = bench.trial
    expected = trial.alone(bench.prompts[0], COUNT)
    original, copy = trial.open(bench.prompts[0]), trial.open(bench.prompts[0])
    trial.read(original)
    bench.device.copy_blocks(list(zip(original.blocks, copy.blocks, strict=True)))
    copy.tokens, copy.computed = list(original.tokens), original.computed
    _finish(bench, [original, copy], [expected, expected])


# -- faults: of a device in another process


def killed_between_steps(bench: Bench) -> None:
    """killed between steps, restarted"""
    device, expected = _remote(bench), _each_alone(bench)
    os.kill(device.pid, signal.SIGKILL)
    _refuses(DeviceLost, lambda: bench.trial.run([_prompt_row(bench, Want.NOTHING)]))
    _refuses(DeviceLost, lambda: bench.device.copy_blocks([]))
    device.restart()
    _equal("tokens after the restart", _each_alone(bench), expected)


def killed_in_a_step(bench: Bench) -> None:
    """killed in a step, restarted"""
    device, expected = _remote(bench), _each_alone(bench)
    pid = device.pid
    os.kill(pid, signal.SIGSTOP)  # the step below waits for it
    killer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
    killer.start()
    try:
        _refuses(DeviceLost, lambda: bench.trial.run([_prompt_row(bench, Want.NOTHING)]))
    finally:
        killer.join()
    device.restart()
    _equal("tokens after the restart", _each_alone(bench), expected)


def stopped_in_a_step(bench: Bench) -> None:
    """stopped in a step: found by its silence, restarted"""
    device, expected = _remote(bench), _each_alone(bench)
    usual = device.deadlines
    device.deadlines = replace(usual, silence=SILENCE)
    os.kill(device.pid, signal.SIGSTOP)
    try:
        error = _refuses(DeviceLost, lambda: bench.trial.run([_prompt_row(bench, Want.NOTHING)]))
    finally:
        device.deadlines = usual
    if "no sign of life" not in str(error):
        raise Failed(f"lost for another reason: {error}")
    device.restart()
    _equal("tokens after the restart", _each_alone(bench), expected)


def reported(bench: Bench) -> None:
    """an error there is one here, and the process lives on"""
    device = bench.make()
    try:
        _refuses(LoadError, lambda: device.load("/no-model-here", bench.config.device_options()))
        if not isinstance(device, RemoteDevice) or not device.is_alive:
            raise Failed("the process ended with the error")
    finally:
        device.close()


def nothing_left(bench: Bench) -> None:
    """closed, and no process of it is left"""
    pid = _remote(bench).pid
    bench.device.close()
    bench.device.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists():
        if time.monotonic() > deadline:
            raise Failed(f"process {pid} is still there")
        time.sleep(0.05)


CONTRACT: tuple[Check, ...] = (plain_data, verbs_in_order, missing_model, sealed, unknown_shape, logits, likeliest)
EXACTNESS: tuple[Check, ...] = (repeated, joined_late, batched, left_early, chunked, mixed, copied_blocks)
END: tuple[Check, ...] = (closed,)
FAULTS: tuple[Check, ...] = (killed_between_steps, killed_in_a_step, stopped_in_a_step, reported, nothing_left)


def _equal(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise Failed(f"{what}: {found}, expected {expected}")


def _refuses(kind: type[DeviceError], act: Callable[[], object]) -> DeviceError:
    try:
        act()
    except kind as error:
        return error
    raise Failed(f"accepted what must be refused with {kind.__name__}")


def _unknown_shape(bench: Bench) -> StepShape:
    """One row more than any compiled graph has."""
    largest = max(shape.decode_rows for shape in bench.config.plan.shapes)
    return StepShape(largest + 1, 1, 0, bench.config.max_model_len)


def _each_alone(bench: Bench) -> list[list[int]]:
    return [bench.trial.alone(prompt, COUNT) for prompt in bench.prompts]


def _finish(bench: Bench, live: Sequence[Request], expected: Sequence[Sequence[int]]) -> None:
    while any(len(request.generated) < COUNT for request in live):
        bench.trial.advance(live)
    bench.trial.close(*live)
    _equal("tokens", [request.generated[:COUNT] for request in live], [list(tokens) for tokens in expected])


def _prompt_row(bench: Bench, want: Want) -> Row:
    tokens = int32(list(bench.prompts[0])[: bench.config.plan.chunk_tokens])
    blocks = int32(list(range(1, 1 + bench.trial.blocks_per_request)))
    return Row(tokens, 0, blocks, is_decode=False, want=want)


def _read(bench: Bench, want: Want) -> RowOutput:
    [output] = bench.trial.run([_prompt_row(bench, want)])
    return output


def _logits(bench: Bench) -> Float32:
    if bench.config.samples_by_its_own_rule:
        raise Skipped("sampling is compiled into the device")
    found = _read(bench, Want.LOGITS).logits
    if found is None:
        raise Failed("no logits where they were wanted")
    return found


def _remote(bench: Bench) -> RemoteDevice:
    if not isinstance(bench.device, RemoteDevice):
        raise Skipped("the device is in this process")
    return bench.device
