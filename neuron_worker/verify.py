"""`neuronserve verify`: the device of this machine through contract, exactness and faults; one table to hand on.

    verify(asked, environ) ──▶ Verdict(text, passed)

The device is the one a server would use with these options (`picking`), on a model of the user's or on a tiny random
one. Contract and exactness run where the server would run the device; faults always in another process, because one
has to die. On a chip that is `device_python`'s or none: a process keeps its cores until it ends. Imports neither vLLM
nor, by itself, torch.
"""

from __future__ import annotations

import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from neuronserve.bucketing.errors import BucketError
from neuronserve.bucketing.plan import CONTEXT_KEY, TOKEN_GENERATION_KEY

from . import answer_checks, checks, reference, tiny_checkpoint
from .checks import Bench, Check
from .config import NeuronConfig, ServeRequest
from .device.base import Device
from .device.errors import DeviceError
from .picking import check_room
from .resolve import Resolution, resolve
from .trial import Trial

LONGEST = 256
SEQUENCES = 4
GROUPS: tuple[tuple[str, Sequence[Check]], ...] = (
    ("contract", checks.CONTRACT),
    ("exactness", (*checks.EXACTNESS, *answer_checks.CHECKS)),
    ("contract", checks.END),
)
"""Of the device where the server would run it."""

_IGNORED = (CONTEXT_KEY, TOKEN_GENERATION_KEY, "NEURONSERVE_CHUNK_TOKENS", "NEURONSERVE_REQUIRE_CACHED")
"""Sizes of a server's graphs; a verification has few and small ones, and compiles them."""


@dataclass(frozen=True)
class Asked:
    """From the command line; None: what the environment or the default says."""

    options: Mapping[str, object] = field(default_factory=dict)  # ours
    model_dir: str | None = None  # None: a tiny random model
    cores: int = 1


@dataclass(frozen=True)
class Line:
    group: str
    what: str
    result: str  # "pass", "skip: why", "FAIL: why"
    seconds: float

    @property
    def failed(self) -> bool:
        return self.result.startswith("FAIL")


@dataclass(frozen=True)
class Verdict:
    text: str
    passed: bool


def verify(asked: Asked, environ: Mapping[str, str], say: Callable[[str], None] = lambda line: None) -> Verdict:
    """Raises `ConfigError` where no device can be had at all."""
    with tempfile.TemporaryDirectory(prefix="neuronserve-verify-") as scratch:
        model_dir = asked.model_dir or tiny_checkpoint.write(Path(scratch))
        resolution = resolve(
            ServeRequest(
                model_dir=model_dir,
                max_model_len=min(LONGEST, _longest(model_dir, asked, environ)),
                max_num_seqs=SEQUENCES,
                tensor_parallel_size=asked.cores,
                options=asked.options,
            ),
            _quiet(environ),
        )
        check_room(resolution.config, resolution.memory_facts, resolution.machine)
        lines: list[Line] = []
        for line in _lines(resolution, model_dir):
            say(f"{line.group}: {line.what}: {line.result}")
            lines.append(line)
    name = "a tiny random Llama" if asked.model_dir is None else Path(asked.model_dir).resolve().name
    return Verdict(_report(resolution, name, lines), not any(line.failed for line in lines))


def _quiet(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in _IGNORED}


def _longest(model_dir: str, asked: Asked, environ: Mapping[str, str]) -> int:
    return resolve(ServeRequest(model_dir, options=asked.options), _quiet(environ)).config.max_model_len


def _lines(resolution: Resolution, model_dir: str) -> Iterator[Line]:
    config = resolution.config

    def elsewhere() -> Device:
        python = config.device_python or sys.executable
        return replace(config, device_python=python).create_device()

    yield from run_groups(config, model_dir, config.create_device, GROUPS)
    if config.capabilities.on_chip and config.device_python is None:
        yield from _skipped("faults", checks.FAULTS, "this process keeps the cores; name a device_python")
    else:
        yield from run_groups(config, model_dir, elsewhere, [("faults", checks.FAULTS)])


def run_groups(
    config: NeuronConfig, model_dir: str, make: Callable[[], Device], groups: Sequence[tuple[str, Sequence[Check]]]
) -> Iterator[Line]:
    """One device through some groups of checks, brought up before and closed after them."""
    first = groups[0][0]
    device: Device | None = None
    try:
        began = time.perf_counter()
        try:
            device = make()
            trial = Trial(device, config)
            compiling = trial.bring_up(model_dir)
        except DeviceError as error:
            yield Line(first, "the device comes up", f"FAIL: {error}", time.perf_counter() - began)
            return
        what = f"the device comes up, {len(config.plan.shapes)} graphs in {compiling:.1f} s"
        yield Line(first, what, "pass", time.perf_counter() - began)
        answers = cache(lambda: reference.logits_of(config, model_dir))
        bench = Bench(config, model_dir, make, trial, _prompts(config.vocab_size), answers)
        for group, members in groups:
            for check in members:
                yield _one(group, check, bench)
    finally:
        if device is not None:
            device.close()


def _one(group: str, check: Check, bench: Bench) -> Line:
    bench.trial.reset()
    began = time.perf_counter()
    what, result = _words(check), "pass"
    try:
        if said := check(bench):
            what = f"{what}: {said}"
    except checks.Skipped as why:
        result = f"skip: {why}"
    except (checks.Failed, DeviceError, BucketError) as error:
        result = f"FAIL: {' '.join(str(error).split())}"
    return Line(group, what, result, time.perf_counter() - began)


def _skipped(group: str, members: Sequence[Check], why: str) -> Iterator[Line]:
    for check in members:
        yield Line(group, _words(check), f"skip: {why}", 0.0)


def _words(check: Check) -> str:
    return " ".join((check.__doc__ or check.__name__).split())


def _prompts(vocab_size: int) -> list[list[int]]:
    draw = random.Random(3)
    return [[draw.randrange(3, vocab_size) for _ in range(length)] for length in (11, 7, 2, 9)]


def _report(resolution: Resolution, model: str, lines: Sequence[Line]) -> str:
    config, here = resolution.config, resolution.machine
    facts = {
        "device": f"{config.backend}, {config.tensor_parallel_size} core(s), {config.dtype}",
        "machine": f"{here.instance or platform.machine()}, {', '.join(here.devices) or 'no Neuron device'}"
        + (f", driver {here.driver}" if here.driver else ""),
        "server": f"neuronserve {_version('neuronserve')}, Python {platform.python_version()}",
        "device side": _device_side(resolution),
        "model": model,
    }
    counts = {word: sum(line.result.startswith(word) for line in lines) for word in ("pass", "skip", "FAIL")}
    return "\n".join(
        [
            "| | |",
            "| --- | --- |",
            *(f"| {name} | {value} |" for name, value in facts.items()),
            "",
            "| group | check | result | seconds |",
            "| --- | --- | --- | --- |",
            *(f"| {x.group} | {x.what} | {x.result.replace('|', '/')} | {x.seconds:.2f} |" for x in lines),
            "",
            f"{counts['pass']} passed, {counts['skip']} skipped, {counts['FAIL']} failed",
        ]
    )


def _device_side(resolution: Resolution) -> str:
    sdk = resolution.machine.sdk
    if sdk is None:
        return "another interpreter" if resolution.config.device_python else "in the server's Python"
    return ", ".join([f"Python {sdk.version}", *(f"{name} {found}" for name, found in sdk.packages.items())])


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"
