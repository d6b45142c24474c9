"""Answers and features by this package's `cpu` device: what a step computes of a token is its feature as well.

    prompts ─ read, up to their last token ─▶ places ─ write, a token of each a step ─▶ answers, and features of both

Rows share two compiled shapes: one reads many tokens of a few prompts, one writes a token of every place. A place that
is free takes the next prompt. Weights and activations are int8, several times faster than torch: it moves a feature by
some 6 % (root mean square, SmolLM2-135M), and hardly ever the token it stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from neuronserve.neuron_worker.device.base import DeviceOptions, ModelFacts, StepShape, Want
from neuronserve.neuron_worker.device.cpu.device import CpuDevice
from neuronserve.neuron_worker.device.cpu.native_ops import NativeOps, Recording, Value
from neuronserve.neuron_worker.device.cpu.program import padding_batch
from neuronserve.neuron_worker.device.graph.decoder import decode_step
from neuronserve.neuron_worker.device.graph.ops import LinearWeight, NormWeight

from .answers import Features, Written

_READERS, _WIDTH, _BLOCK = 8, 64, 32


class _ReadOps(NativeOps):
    """Ends at the final norm: what the device calls logits are the features."""

    def finish(self, x: Value, hidden: Value | None, norm: NormWeight, head: LinearWeight) -> None:
        self.recording.logits = self.norm(x, norm)
        self.recording.slice_start = len(self.recording.ops)


class _WriteOps(NativeOps):
    """Draws a token, and what the device calls logits are the features."""

    def finish(self, x: Value, hidden: Value | None, norm: NormWeight, head: LinearWeight) -> None:
        features = self.norm(x, norm)
        super().finish(x, None, norm, head)
        self.recording.logits = features


class _FeatureDevice(CpuDevice):
    def load(self, model_dir: str, options: DeviceOptions, draft_dir: str | None = None) -> ModelFacts:
        facts = super().load(model_dir, options)
        self.reading, self.writing = self._recorded(_ReadOps()), self._recorded(_WriteOps())
        return facts

    def _recorded(self, ops: NativeOps) -> Recording:
        assert self._model is not None
        decode_step(ops, self._model)
        return ops.recording

    def compile_as(self, recording: Recording, shape: StepShape) -> None:
        self._recording = recording
        self.compile(shape)

    def features(self, shape: StepShape, count: int, hidden_size: int) -> Features:
        """[count, H] of the last step's selected rows."""
        return self._programs[shape].logits(count)[:, :hidden_size].astype(np.float16)


@dataclass
class _Place:
    row: int
    tokens: list[int]  # prompt and answer so far
    prompt: int  # its tokens
    read: int = 0
    parts: list[Features] = field(default_factory=list)


class _Step:
    """One shape and its buffers."""

    def __init__(self, rows: int, width: int, context: int) -> None:
        self.batch = padding_batch(StepShape(rows, width, 0, context), 0, -(-context // _BLOCK), 0)
        assert self.batch.decode is not None
        self.shape, self.decode, self.sampling = self.batch.shape, self.batch.decode, self.batch.sampling


class DeviceWriter:
    """Prompts and answers of at most `most_tokens` together."""

    def __init__(
        self, target: str, hidden_size: int, most_tokens: int, ends: Iterable[int] = (), num_places: int = 64
    ) -> None:
        blocks = -(-most_tokens // _BLOCK)
        context = blocks * _BLOCK
        options = DeviceOptions(
            num_places, context, _BLOCK, 1, quantization="int8", quantize_head=True, activations="int8"
        )
        self._hidden_size = hidden_size
        self._ends = frozenset(ends)
        self._draw = np.random.default_rng(0)
        self._device = _FeatureDevice()
        self._device.load(target, options)
        self._device.allocate(1 + num_places * blocks)
        self._reading, self._writing = _Step(_READERS, _WIDTH, context), _Step(num_places, 1, context)
        self._device.compile_as(self._device.reading, self._reading.shape)
        self._device.compile_as(self._device.writing, self._writing.shape)
        self._blocks = 1 + np.arange(num_places * blocks, dtype=np.int32).reshape(num_places, blocks)
        self._writing.decode.blocks[:] = self._blocks

    def write(self, prompts: Sequence[list[int]], num_tokens: int, temperature: float) -> list[Written]:
        self._writing.sampling.temperature[:] = temperature
        written = [Written([])] * len(prompts)
        waiting = iter(range(len(prompts)))
        places: dict[int, _Place] = {}
        has_more = True
        while places or has_more:
            free = [place for place in range(len(self._blocks)) if place not in places][:_READERS]
            if has_more and (len(free) == _READERS or not places):
                rows = [(place, row) for place, row in zip(free, waiting, strict=False)]
                has_more = len(rows) == len(free)
                new = {place: _Place(row, list(prompts[row]), len(prompts[row])) for place, row in rows}
                self._read(new)
                places |= new
                continue
            self._write_token(places)
            for at, place in list(places.items()):
                if place.tokens[-1] in self._ends or len(place.tokens) - place.prompt == num_tokens:
                    written[place.row] = Written(place.tokens[place.prompt :], np.concatenate(place.parts))
                    del places[at]
        return written

    def read(self, rows: Sequence[list[int]]) -> list[Features]:
        """[tokens, H] of each row."""
        found: dict[int, Features] = {}
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))  # those that are read together end together
        for start in range(0, len(rows), _READERS):
            new = {at: _Place(row, [*rows[row], 0], 0) for at, row in enumerate(order[start : start + _READERS])}
            self._read(new)
            found |= {place.row: np.concatenate(place.parts) for place in new.values()}
        return [found[row] for row in range(len(rows))]

    def _read(self, places: dict[int, _Place]) -> None:
        """All tokens but the last of each place."""
        step = self._reading
        while left := [(at, place) for at, place in places.items() if place.read < len(place.tokens) - 1]:
            step.decode.lengths[:] = 0
            step.sampling.want[:] = Want.NOTHING
            for row, (at, place) in enumerate(left):
                tokens = place.tokens[place.read : min(place.read + _WIDTH, len(place.tokens) - 1)]
                step.decode.tokens[row, : len(tokens)] = tokens
                step.decode.positions[row], step.decode.lengths[row] = place.read, len(tokens)
                step.decode.blocks[row] = self._blocks[at]
                step.sampling.want[row] = Want.LOGITS
            self._device.run(step.batch)
            made = self._device.features(step.shape, int(step.decode.lengths.sum()), self._hidden_size)
            ends = np.cumsum(step.decode.lengths[: len(left)])
            for (_, place), part in zip(left, np.split(made, ends[:-1]), strict=True):
                place.parts.append(part)
                place.read += len(part)

    def _write_token(self, places: dict[int, _Place]) -> None:
        step = self._writing
        step.decode.lengths[:] = 0
        step.sampling.want[:] = Want.NOTHING
        step.sampling.uniforms[:] = self._draw.random(step.sampling.uniforms.shape)
        for at, place in places.items():
            step.decode.tokens[at, 0] = place.tokens[-1]
            step.decode.positions[at], step.decode.lengths[at] = len(place.tokens) - 1, 1
            step.sampling.want[at] = Want.TOKEN
        tokens = self._device.run(step.batch).tokens
        made = self._device.features(step.shape, len(places), self._hidden_size)
        for index, at in enumerate(sorted(places)):
            places[at].parts.append(made[index : index + 1])
            places[at].tokens.append(int(tokens[at, 0]))

    def close(self) -> None:
        self._device.close()
