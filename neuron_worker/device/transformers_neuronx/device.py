"""Slots of the classic library behind the device protocol.

    load: read config.json, import the SDK     compile: collect shapes     seal: build and compile all at once
    run: prompts, grouped by bucket, or one decode of every running sequence

The library takes the whole set of buckets when a model is made, so nothing is built before the shapes are known: at
`seal`, or at the first step where a caller does not seal. Block id minus one is the slot.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from .. import environment
from ..base import (
    Capabilities,
    DecodePart,
    DeviceOptions,
    DeviceOutput,
    DraftRequest,
    Int32,
    ModelFacts,
    PackedBatch,
    PrefillPart,
    StepShape,
)
from ..draft_rows import no_draft
from ..errors import DeviceError, DoesNotFit, UncompiledShape
from . import draft_pair, neuron_config, sdk
from .build import Blueprint
from .capabilities import CAPABILITIES
from .checkpoint import Checkpoint
from .engine import Engine
from .prompts import Call, Prompt, by_bucket, call_of
from .sampling import ChipEnding, Ended, Ending, HostEnding
from .slots import Slots


@dataclass
class _Loaded:
    """From `load` on."""

    blueprint: Blueprint
    slots: Slots
    ending: Ending
    engine: Engine | None = None  # once built
    has_cache: bool = False

    def build(self) -> Engine:
        """A new engine has the sampling it was compiled with, whatever the one before it was told."""
        self.engine = self.blueprint.build()
        self.ending = _ending(self.blueprint)
        return self.engine


class NeuronxDevice:
    def __init__(
        self, capabilities: Capabilities = CAPABILITIES, environ: MutableMapping[str, str] = os.environ
    ) -> None:
        self._capabilities = capabilities
        self._environ = environ
        self._lock = threading.Lock()  # the library's input buffers are shared: one call at a time
        self._shapes: set[StepShape] = set()
        self._sealed = False
        self._loaded: _Loaded | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def load(self, model_dir: str, options: DeviceOptions, draft_dir: str | None = None) -> ModelFacts:
        target = draft_pair.read(model_dir, options)
        draft = None if draft_dir is None else draft_pair.read(draft_dir, options)
        environment.prepare(self._environ, options.tensor_parallel_size, options.compiler_cache)
        blueprint = Blueprint.of(sdk.load(), options, target, draft, self._environ)
        self._loaded = _Loaded(blueprint, Slots(options.max_num_seqs), _ending(blueprint))
        self._shapes, self._sealed = set(), False
        return _facts(target, options, blueprint)

    def allocate(self, num_blocks: int) -> None:
        """The library allocates one line per sequence when it is built; here the count is checked."""
        loaded = self._need()
        most = loaded.blueprint.options.max_num_seqs + 1
        if num_blocks > most:
            raise DoesNotFit(
                f"{num_blocks} cache blocks: a block is a slot, and --max-num-seqs {most - 1} gives {most} with the "
                f"scratch block; start with --num-gpu-blocks-override {most}, or leave the cache's size out"
            )
        loaded.has_cache = True

    def compile(self, shape: StepShape) -> None:
        loaded = self._need()
        if self._sealed:
            raise UncompiledShape(f"{shape} cannot be compiled after the device was sealed")
        if loaded.blueprint.add(shape) and loaded.engine is not None:
            loaded.engine = None  # all graphs are one build; what the cache held goes with it
            loaded.slots.forget()
        self._shapes.add(shape)

    def seal(self) -> None:
        loaded = self._need()
        if self._shapes and loaded.engine is None:
            loaded.build()
        self._sealed = True

    def draft(self, batch: PackedBatch, request: DraftRequest) -> Int32:
        raise no_draft()

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        if pairs:
            raise DeviceError(f"{self._capabilities.name} keeps whole sequences in slots and copies none")

    def close(self) -> None:
        with self._lock:
            self._loaded = None
            self._shapes.clear()

    def run(self, batch: PackedBatch) -> DeviceOutput:
        with self._lock:
            return self._run(batch)

    def _run(self, batch: PackedBatch) -> DeviceOutput:
        loaded = self._need()
        if batch.shape not in self._shapes:
            raise UncompiledShape(f"{batch.shape} was not compiled; compiled: {sorted(self._shapes)}")
        if not loaded.has_cache:
            raise DeviceError("a step before allocate: the cache has no size yet")
        step = _Step(loaded.engine or loaded.build(), loaded, batch)
        try:
            return step.run()
        except DeviceError:
            if step.has_started:
                loaded.slots.forget()
            raise

    def _need(self) -> _Loaded:
        if self._loaded is None:
            raise DeviceError("no model is loaded; load comes first")
        return self._loaded


class _Step:
    """One call of `run`. Everything is checked before the library is called."""

    def __init__(self, engine: Engine, loaded: _Loaded, batch: PackedBatch) -> None:
        self._engine, self._slots, self._ending = engine, loaded.slots, loaded.ending
        self._blueprint, self._batch = loaded.blueprint, batch
        self._calls: list[Ended] = []
        self._seconds = 0.0
        self.has_started = False

    def run(self) -> DeviceOutput:
        batch = self._batch
        if batch.prefill is not None:
            self._read_prompts(batch.prefill)
        if batch.decode is not None:
            self._decode(batch.decode)
        tokens, logits = self._ending.end(self._calls, batch.sampling, batch.shape.decode_width)
        return DeviceOutput(tokens, logits, device_seconds=self._seconds)

    def _read_prompts(self, part: PrefillPart) -> None:
        prompts = self._prompts(part)
        self._slots.check([prompt.slot for prompt in prompts])
        groups = list(by_bucket(prompts, self._blueprint.context_buckets))
        self._set_sampling([prompt.slot for prompt in prompts], [prompt.place for prompt in prompts])
        for group in groups:
            self._call(self._engine.read, call_of(group, self._engine.narrowest), [prompt.place for prompt in group])
            for prompt in group:
                self._slots.prefilled(prompt.slot, len(prompt.tokens))

    def _prompts(self, part: PrefillPart) -> list[Prompt]:
        if (part.targets >= 0).any():
            raise DeviceError(
                "prompt log-probabilities: the library gives the last token's logits only; leave them out"
            )
        prompts = []
        for row in np.flatnonzero(part.lengths).tolist():
            if part.positions[row]:
                raise DeviceError(f"a prompt starts at position {part.positions[row]}: prompts are read whole, from 0")
            start, length = int(part.starts[row]), int(part.lengths[row])
            place, slot = self._batch.shape.decode_rows + row, int(part.blocks[row, 0]) - 1
            prompts.append(Prompt(place, slot, part.tokens[start : start + length]))
        return prompts

    def _decode(self, part: DecodePart) -> None:
        places = np.flatnonzero(part.lengths).tolist()
        if not places:
            return
        self._check_rows(part, places)
        slots = (part.blocks[places, 0] - 1).tolist()
        positions = part.positions[places].tolist()
        self._slots.check(slots)
        self._slots.check_decode(zip(slots, positions, strict=True))
        self._set_sampling(slots, places)
        call = Call(
            part.tokens[places, :1].astype(np.int64),
            part.positions[places, None].astype(np.int64),
            np.array(slots, np.int64),
        )
        result = self._call(self._engine.decode, call, places)
        counts = [1] * len(slots) if self._engine.num_tokens == 1 else (result >= 0).sum(dim=1).tolist()
        self._slots.decoded(dict(zip(slots, counts, strict=True)))

    def _check_rows(self, part: DecodePart, places: list[int]) -> None:
        if part.lengths[places].max() > 1:
            raise DeviceError(f"a row of {part.lengths.max()} tokens: a draft is verified inside the device only")
        furthest, last = int(part.positions[places].max()), self._blueprint.options.max_model_len - 1
        if furthest > last:
            raise DoesNotFit(
                f"position {furthest} is past the last one, {last}; stop the sequence, or raise --max-model-len"
            )

    def _set_sampling(self, slots: list[int], places: list[int]) -> None:
        changed = self._ending.prepare(slots, places, self._batch.sampling)
        if changed is not None:
            self.has_started = True
            self._engine.set_sampling(self._blueprint.generation_config(changed))
            self._ending.written(changed)

    def _call(self, verb: Callable[[Call], Tensor], call: Call, places: list[int]) -> Tensor:
        self.has_started = True
        started = time.perf_counter()
        result = verb(call)
        self._seconds += time.perf_counter() - started
        self._calls.append(Ended(places, result))
        return result


def _ending(blueprint: Blueprint) -> Ending:
    return HostEnding() if blueprint.sampling is None else ChipEnding(blueprint.sampling)


def _facts(target: Checkpoint, options: DeviceOptions, blueprint: Blueprint) -> ModelFacts:
    item = neuron_config.cache_bytes(options)
    return ModelFacts(
        architecture=target.architecture.name,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        bytes_per_kv_token=2 * target.num_layers * target.num_kv_heads * target.head_dim * item,
        weight_bytes=target.weight_bytes,
        compute_dtype=options.dtype,
        notes=blueprint.notes,
    )
