"""The demo model itself: greedy tokens of every device against one teacher-forced pass of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from neuronserve.neuron_worker.device.base import Device, DeviceOptions, StepShape, Want

from .driver import Driver, Stream, decode, prefill

PROMPTS = ("The capital of France is", "def fibonacci(n):\n", "Im Jahr 1969 landete")
NEW_TOKENS = 16
LONGEST = 64


@pytest.fixture(scope="module")
def transformers_model(smollm2: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()


def test_greedy_tokens(new_device: Callable[[], Device], smollm2: Path, transformers_model: torch.nn.Module) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    device = new_device()
    device.load(str(smollm2), DeviceOptions(4, LONGEST, 16, 4))
    driver = Driver(device, block_size=16, num_blocks=16, max_model_len=LONGEST)
    streams = [Stream(tokenizer(prompt).input_ids) for prompt in PROMPTS]
    lengths = [len(stream.tokens) for stream in streams]

    rows = [prefill(stream, length, want=Want.TOKEN) for stream, length in zip(streams, lengths, strict=True)]
    extend(streams, driver.step(rows, StepShape(0, 1, 32, LONGEST)))
    for _ in range(NEW_TOKENS - 1):
        rows = [decode(stream, want=Want.TOKEN) for stream in streams]
        extend(streams, driver.step(rows, StepShape(4, 1, 0, LONGEST)))

    for stream, length in zip(streams, lengths, strict=True):
        with torch.no_grad():
            logits = transformers_model(torch.tensor([stream.tokens])).logits[0].numpy()
        for position in range(length, length + NEW_TOKENS):
            best = logits[position - 1]
            gap = best.max() - best[stream.tokens[position]]
            assert gap < 1e-4, f"{stream.tokens[position]} at {position}, {int(np.argmax(best))} is {gap} better"
    device.close()


def extend(streams: list[Stream], results: list) -> None:
    for stream, result in zip(streams, results, strict=True):
        stream.tokens.append(int(result.tokens[0]))
