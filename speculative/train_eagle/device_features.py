"""Features by this package's `cpu` device: its graph without the head, in int8, several times faster than torch.

Rows go through one compiled shape, a few at a time and many tokens of each a step. Rounding weights and activations to
int8 moves a feature by some 6 % (root mean square, SmolLM2-135M), and hardly ever the token it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from neuronserve.neuron_worker.device.base import (
    DecodePart,
    DeviceOptions,
    ModelFacts,
    PackedBatch,
    RowSampling,
    StepShape,
    Want,
)
from neuronserve.neuron_worker.device.cpu.device import CpuDevice
from neuronserve.neuron_worker.device.cpu.native_ops import NativeOps, Value
from neuronserve.neuron_worker.device.graph.decoder import decode_step
from neuronserve.neuron_worker.device.graph.ops import LinearWeight, NormWeight

Features = NDArray[np.float16]

_ROWS, _WIDTH, _BLOCK = 8, 64, 32


class _HeadlessOps(NativeOps):
    """Ends at the final norm: what the device calls logits are the features."""

    def finish(self, x: Value, hidden: Value, norm: NormWeight, head: LinearWeight) -> None:
        self.recording.logits = self.norm(x, norm)
        self.recording.slice_start = len(self.recording.ops)


class _HeadlessDevice(CpuDevice):
    def load(self, model_dir: str, options: DeviceOptions, draft_dir: str | None = None) -> ModelFacts:
        facts = super().load(model_dir, options)
        assert self._model is not None
        ops = _HeadlessOps()
        decode_step(ops, self._model)
        self._recording = ops.recording
        return facts


class DeviceFeatures:
    """Of rows of at most `most_tokens`."""

    def __init__(self, target: str, hidden_size: int, most_tokens: int) -> None:
        blocks_per_row = -(-most_tokens // _BLOCK)
        context = blocks_per_row * _BLOCK
        options = DeviceOptions(_ROWS, context, _BLOCK, 1, quantization="int8", activations="int8")
        self._hidden_size = hidden_size
        self._device = _HeadlessDevice()
        self._device.load(target, options)
        self._device.allocate(1 + _ROWS * blocks_per_row)
        shape = StepShape(_ROWS, _WIDTH, 0, context)
        self._device.compile(shape)
        self._decode = DecodePart(
            tokens=np.zeros((_ROWS, _WIDTH), np.int32),
            positions=np.zeros(_ROWS, np.int32),
            lengths=np.zeros(_ROWS, np.int32),
            blocks=1 + np.arange(_ROWS * blocks_per_row, dtype=np.int32).reshape(_ROWS, blocks_per_row),
        )
        ones, zeros = np.ones(_ROWS, np.float32), np.zeros(_ROWS, np.int32)
        self._want = np.zeros(_ROWS, np.int32)
        sampling = RowSampling(self._want, 0 * ones, zeros, ones, 0 * ones, np.zeros((_ROWS, _WIDTH)))
        self._batch = PackedBatch(shape, self._decode, None, sampling)

    def __call__(self, rows: Sequence[list[int]]) -> list[Features]:
        """[tokens, H] of each row."""
        parts: list[list[Features]] = [[] for _ in rows]
        waiting = iter(range(len(rows)))
        places: dict[int, tuple[int, int]] = {}  # of the device's rows: which row is there, and its tokens so far
        while True:
            free = (place for place in range(_ROWS) if place not in places)
            places |= {place: (row, 0) for place, row in zip(list(free), waiting, strict=False)}
            if not places:
                return [np.concatenate(part) for part in parts]
            places = self._step(rows, places, parts)

    def _step(
        self, rows: Sequence[list[int]], places: dict[int, tuple[int, int]], parts: list[list[Features]]
    ) -> dict[int, tuple[int, int]]:
        """The next tokens of all rows that are in place. The result: those that have more."""
        self._decode.lengths[:] = 0
        self._want[:] = Want.NOTHING
        for place, (row, start) in places.items():
            tokens = rows[row][start : start + _WIDTH]
            self._decode.tokens[place, : len(tokens)] = tokens
            self._decode.positions[place], self._decode.lengths[place] = start, len(tokens)
            self._want[place] = Want.LOGITS
        made = self._device.run(self._batch).logits
        assert made is not None
        at, left = 0, {}
        for place, (row, start) in sorted(places.items()):
            count = int(self._decode.lengths[place])
            parts[row].append(made[at : at + count, : self._hidden_size].astype(np.float16))
            at += count
            if start + count < len(rows[row]):
                left[place] = (row, start + count)
        return left

    def close(self) -> None:
        self._device.close()
