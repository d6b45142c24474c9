"""Shapes are prepared aloud, and sealed."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path

import pytest

from neuronserve.neuron_worker.device.arithmetic import ArithmeticDevice
from neuronserve.neuron_worker.device.base import DeviceOptions, StepShape
from neuronserve.neuron_worker.device.errors import UncompiledShape
from neuronserve.neuron_worker.warmup import describe, warm_up

SHAPES = [StepShape(0, 1, 512, 2048), StepShape(4, 1, 0, 256), StepShape(4, 3, 64, 256)]


@pytest.fixture
def device(tmp_path: Path) -> ArithmeticDevice:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    device = ArithmeticDevice()
    device.load(str(tmp_path), DeviceOptions(max_num_seqs=4, max_model_len=2048, block_size=16, prompts_per_call=4))
    device.allocate(2)
    return device


def test_counts_aloud_and_seals(device: ArithmeticDevice) -> None:
    said: list[str] = []
    warm_up(device, SHAPES, said.append, seconds_between_lines=0)
    assert [re.sub(r"\d+\.\d s", "0.4 s", line) for line in said] == [
        "1/3 prefill 512, context 2048, 0.4 s",
        "2/3 decode 4, context 256, 0.4 s",
        "3/3 decode 4 x 3 + prefill 64, context 256, 0.4 s",
        "sealed, 0.4 s",
    ]
    with pytest.raises(UncompiledShape):
        device.compile(SHAPES[0])


def test_a_long_seal_says_that_it_lasts_and_how_long_it_took(device: ArithmeticDevice) -> None:
    said: list[str] = []
    heard = threading.Event()

    def say(line: str) -> None:
        said.append(re.sub(r"\b[\d.]+ s\b", "N s", line))
        if line.startswith("sealing"):
            heard.set()

    class Slow(ArithmeticDevice):
        def seal(self) -> None:
            assert heard.wait(60)
            super().seal()

    device.__class__ = Slow
    warm_up(device, SHAPES, say, seconds_between_lines=0, seconds_between_signs=0.01)
    assert said[3] == "sealing 3 shapes, N s so far"
    assert said[-1] == "sealed, N s"


def test_shapes_that_take_no_time_share_a_line(device: ArithmeticDevice) -> None:
    said: list[str] = []
    warm_up(device, SHAPES, said.append, seconds_between_lines=60)
    assert [line.split()[0] for line in said] == ["3/3"]


def test_a_shape_in_words() -> None:
    assert describe(StepShape(1, 1, 16, 128)) == "decode 1 + prefill 16, context 128"
