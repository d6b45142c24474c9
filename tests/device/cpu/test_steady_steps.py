"""Steps that follow each other as a server's do: nothing is allocated, and what they answer is not copied.

The vocabulary is of a real model's size, so a row of logits that was copied would be 200 KB.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from neuronserve.bucketing.pack import StepPacker
from neuronserve.bucketing.row import Row, int32
from neuronserve.neuron_worker.device.base import DeviceOptions, DeviceOutput, StepShape, Want
from neuronserve.neuron_worker.device.cpu import library
from neuronserve.neuron_worker.device.cpu.device import CpuDevice

from ..models import make, random_tokens
from .harness import instruction_sets

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the kernels cannot be compiled here")

VOCABULARY, BLOCK, LENGTH = 50_000, 8, 96
DECODE, MIXED = StepShape(4, 1, 0, LENGTH), StepShape(4, 1, 8, LENGTH)
NUM_STEPS = 40
SMALL_OBJECTS = 16 * 1024


@dataclass(frozen=True)
class Loaded:
    device: CpuDevice
    packer: StepPacker

    def run(self, rows: list[Row], shape: StepShape) -> DeviceOutput:
        return self.device.run(self.packer.pack(rows, shape))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    model = make("llama", tmp_path_factory.mktemp("large"), vocab_size=VOCABULARY)
    device, packer = CpuDevice(), StepPacker(BLOCK, 1)
    device.load(str(model.directory), DeviceOptions(4, LENGTH, BLOCK, 1, threads=2))
    device.allocate(1 + 5 * LENGTH // BLOCK)
    for shape in (DECODE, MIXED):
        packer.prepare(shape)
        device.compile(shape)
    device.seal()
    yield Loaded(device, packer)
    device.close()


def row(stream: int, position: int, *, is_decode: bool = True, want: Want = Want.TOKEN) -> Row:
    per_stream = LENGTH // BLOCK
    blocks = int32(list(range(1 + stream * per_stream, 1 + (stream + 1) * per_stream)))
    tokens = random_tokens(1 if is_decode else 5, position)
    return Row(int32(tokens), position, blocks, is_decode=is_decode, want=want)


def steps() -> list[tuple[list[Row], StepShape]]:
    """Requests that grow, now four and now three beside a chunk of a fifth, one of them sampled on the host."""
    found = []
    for position in range(NUM_STEPS):
        wants = (Want.TOKEN, Want.LOGITS, Want.TOKEN)
        rows = [row(stream, position, want=want) for stream, want in enumerate(wants)]
        if position % 3 == 2:
            found.append(([*rows, row(4, position, is_decode=False)], MIXED))
        else:
            found.append(([*rows, row(3, position)], DECODE))
    return found


def test_steps_of_growing_requests_allocate_no_memory(loaded: Loaded) -> None:
    asked = steps()
    for rows, shape in asked:
        loaded.run(rows, shape)
    num_maps = library.load().ns_maps()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    for rows, shape in asked:
        loaded.run(rows, shape)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert library.load().ns_maps() == num_maps
    assert peak < SMALL_OBJECTS


def test_logits_and_tokens_are_views_of_what_the_kernels_wrote(loaded: Loaded) -> None:
    for rows, shape in steps()[:3]:
        output = loaded.run(rows, shape)
        assert output.logits is not None
        assert output.logits.shape == (1, VOCABULARY)
        session = loaded.device._session
        assert session is not None
        assert np.shares_memory(output.logits, session.workspace)
        assert np.shares_memory(output.tokens, loaded.device._results.tokens)


@pytest.mark.skipif(shutil.which("cc") is None, reason="the counter is compiled")
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="counts by the names that glibc has")
def test_the_kernels_ask_nothing_of_the_heap_in_a_step(tmp_path: Path) -> None:
    """Counted as it is asked: what is given back within a step leaves no trace in how much is in use."""
    counter = tmp_path / "heap_calls.so"
    here = Path(__file__).parent
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", str(here / "heap_calls.c"), "-o", str(counter)], check=True)
    model = make("llama", tmp_path / "model")
    command = [sys.executable, "-m", "tests.device.cpu.count_heap_calls", str(model.directory)]
    environment = dict(os.environ, LD_PRELOAD=str(counter))
    done = subprocess.run(command, cwd=here.parents[2], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    at_start, in_steps = map(int, done.stdout.split())
    assert at_start > 0, "a session takes some, so counting works"
    assert in_steps == 0
