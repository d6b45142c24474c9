"""What a device has to answer: the logits after every position of two fixed texts, from elsewhere than the device.

    logits_of(config, model_dir) ──▶ Reference(by, texts, logits, allowed)

The source is the `cpu` device on the same checkpoint with the same types, for the `cpu` device itself `cpu-torch`; for
an `arithmetic` device its rule. Texts are read many tokens at a time: a large model's weights are read few times.
Knows nothing of the plan of the device under test.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from neuronserve.bucketing.pack import StepPacker, unpack
from neuronserve.bucketing.row import Row, int32

from .config import NeuronConfig
from .device import registry
from .device.arithmetic import answer
from .device.base import DeviceOptions, Float32, StepShape, Want
from .device.errors import DeviceError

ALLOWED = {"float32": 0.01, "float16": 0.05, "bfloat16": 0.25}
"""Of the spread (see `apart`). Computing the tiny model in float16 or bfloat16 moves its logits by 0.007 and 0.08."""

ALLOWED_QUANTIZED = {"int8": 0.1, "f8e4m3fn": 0.5}
"""At least: the same int8 weights, against unquantised ones where the `cpu` device has no such type."""

WIDTH, BLOCK_SIZE = 32, 16


class NoReference(Exception):
    """Why there is none for this checkpoint."""


@dataclass(frozen=True)
class Reference:
    by: str
    texts: tuple[tuple[int, ...], ...]
    logits: tuple[Float32, ...]  # [tokens of the text, vocabulary], after each token
    allowed: float


def logits_of(config: NeuronConfig, model_dir: str) -> Reference:
    texts = texts_of(config)
    if config.backend.startswith("arithmetic"):
        return Reference("its rule", texts, tuple(_by_rule(text, config.vocab_size) for text in texts), 0.0)
    backend = "cpu-torch" if config.backend == "cpu" else "cpu"
    try:
        logits = _computed(backend, model_dir, _options(config), texts)
    except (DeviceError, MemoryError) as error:
        reason = " ".join(str(error).split()) or "not enough memory"
        raise NoReference(f"the {backend} device cannot compute this model beside it: {reason}") from error
    return Reference(f"the {backend} device", texts, logits, _allowed(config))


def texts_of(config: NeuronConfig) -> tuple[tuple[int, ...], ...]:
    """They leave room for the last token that can be generated."""
    return tuple(_text(seed, config.max_model_len - 1, config.vocab_size) for seed in (5, 6))


def apart(found: Float32, expected: Float32) -> float:
    """Root of the mean square difference of one position's logits, as a share of their standard deviation."""
    if found.shape != expected.shape or not np.isfinite(found).all():
        return float("inf")
    difference = found.astype(np.float64) - expected
    return float(np.sqrt((difference**2).mean()) / expected.std())


def below_the_likeliest(token: int, expected: Float32) -> float:
    """How far the token's logit is below the largest, in the same measure."""
    if not 0 <= token < len(expected):
        return float("inf")
    return float((expected.max() - expected[token]) / expected.std())


def _text(seed: int, length: int, vocab_size: int) -> tuple[int, ...]:
    draw = random.Random(seed)
    return tuple(draw.randrange(3, vocab_size) for _ in range(length))


def _by_rule(text: Sequence[int], vocab_size: int) -> Float32:
    halves, ids = (-np.log(2) * np.arange(vocab_size)).astype(np.float32), np.arange(vocab_size)
    answers = [answer(text[: end + 1], vocab_size) for end in range(len(text))]
    logits: Float32 = halves[(ids - np.array(answers)[:, None]) % vocab_size]
    return logits


def _options(config: NeuronConfig) -> DeviceOptions:
    known = registry.capabilities("cpu").quantizations
    return replace(
        config.device_options(),
        max_num_seqs=1,
        prompts_per_call=1,
        block_size=BLOCK_SIZE,
        quantization=config.quantization if config.quantization in known else None,
        tensor_parallel_size=1,
        neuron_config={},
        num_drafts=0,
        require_artifacts=False,
    )


def _computed(
    backend: str, model_dir: str, options: DeviceOptions, texts: Sequence[Sequence[int]]
) -> tuple[Float32, ...]:
    num_blocks = -(-options.max_model_len // BLOCK_SIZE)
    shape = StepShape(1, WIDTH, 0, num_blocks * BLOCK_SIZE)
    packer = StepPacker(BLOCK_SIZE, 1)
    packer.prepare(shape)
    device = registry.create(backend)
    try:
        device.load(model_dir, options)
        device.allocate(1 + num_blocks)
        device.compile(shape)
        device.seal()
        read: list[Float32] = []
        for text in texts:
            parts = []
            for start in range(0, len(text), WIDTH):
                tokens = int32(list(text[start : start + WIDTH]))
                blocks = int32(list(range(1, 1 + num_blocks)))
                row = Row(tokens, start, blocks, is_decode=True, want=Want.LOGITS)
                [output] = unpack(device.run(packer.pack([row], shape)), [row], shape)
                assert output.logits is not None
                parts.append(output.logits.copy())
            read.append(np.concatenate(parts))
        return tuple(read)
    finally:
        device.close()


def _allowed(config: NeuronConfig) -> float:
    return max(ALLOWED[config.dtype], ALLOWED_QUANTIZED.get(config.quantization or "", 0.0))
