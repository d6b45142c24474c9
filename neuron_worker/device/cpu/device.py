"""The embedded `cpu` device: C kernels over packed weights, one call into the library per step.

`load` packs the checkpoint and records the graph, `compile` binds it to a shape and reserves the memory, `run` hands
over addresses. Where no library can be had, `create` gives the same device on torch instead.
Knows no request and no policy.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence, Set
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..base import (
    Capabilities,
    Device,
    DeviceOptions,
    DeviceOutput,
    DraftRequest,
    Int32,
    ModelFacts,
    PackedBatch,
    StepShape,
)
from ..draft_rows import no_draft, not_the_last
from ..errors import DeviceError, DoesNotFit, UncompiledShape, UnsupportedModel
from ..graph.decoder import Model, decode_step, lean_step
from ..graph.draft import Draft, load_draft
from ..graph.ops import FloatType
from ..graph.spec import kv_bytes_per_token
from . import packed
from .capabilities import CAPABILITIES
from .draft_program import DraftProgram
from .library import ISA_VARIABLE, TYPES, NativeMissing, Session, load, num_threads
from .native_ops import NativeOps, Recording
from .packer import NativePacker
from .program import BoundProgram, Results, padding_batch

log = logging.getLogger(__name__)


def create(capabilities: Capabilities = CAPABILITIES) -> Device:
    """The device on C kernels, or on torch where there is no library and no compiler."""
    try:
        load()
    except NativeMissing as missing:
        log.warning("%s. The cpu device runs on torch instead: the same arithmetic, several times slower.", missing)
        from ..graph.torch_device import TorchDevice

        return TorchDevice(capabilities)
    return CpuDevice(capabilities)


class CpuDevice:
    """See `base.Device` for the order of calls."""

    def __init__(self, capabilities: Capabilities = CAPABILITIES) -> None:
        self.capabilities = capabilities
        self._session: Session | None = None
        self._model: Model | None = None
        self._options: DeviceOptions | None = None
        self._recording: Recording | None = None
        self._lean: Recording | None = None  # for steps without scores, where nobody reads features
        self._draft: Draft | None = None
        self._draft_recording: Recording | None = None
        self._results = Results()
        self._programs: dict[StepShape, BoundProgram] = {}
        self._draft_programs: dict[StepShape, DraftProgram] = {}
        self._ran: StepShape | None = None  # of the last step
        self._num_blocks = 0
        self._sealed = False

    def load(self, model_dir: str, options: DeviceOptions, draft_dir: str | None = None) -> ModelFacts:
        if options.dtype not in TYPES[:3]:
            raise UnsupportedModel(f"dtype is {options.dtype!r}; supported are {', '.join(TYPES[:3])}")
        self.close()
        isa, lingers = os.environ.get(ISA_VARIABLE, ""), options.across_processes
        self._session = Session(num_threads(options.threads), isa, lingers=lingers)
        self._model, packer = packed.load(model_dir, options, self._session)
        self._options = options
        num_bytes = packer.num_bytes
        if draft_dir is not None:
            num_bytes += self._load_draft(draft_dir, model_dir, options)
        ops = NativeOps()
        decode_step(ops, self._model, self._draft)
        self._recording = ops.recording
        if self._draft is None or not self._draft.feature_width:
            lean = NativeOps()
            lean_step(lean, self._model)
            self._lean = lean.recording
        spec = self._model.spec
        return ModelFacts(
            architecture=spec.architecture,
            vocab_size=spec.vocab_size,
            num_layers=spec.num_layers,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            bytes_per_kv_token=self._bytes_per_token(options.block_size),
            weight_bytes=num_bytes,
            compute_dtype="float32",
            notes=_notes(options, self._session, packer.types),
        )

    def _load_draft(self, draft_dir: str, model_dir: str, options: DeviceOptions) -> int:
        """Its bytes."""
        session, model, _ = self._loaded()
        packer = NativePacker(session, cast(FloatType, options.dtype), options.activations)
        try:
            self._draft = load_draft(draft_dir, model_dir, model, options, packer)
        except DeviceError:
            self.close()
            raise
        ops = NativeOps()
        self._draft.guess(ops)
        self._draft_recording = ops.recording
        return packer.num_bytes

    def _bytes_per_token(self, block_size: int) -> int:
        session, model, _ = self._loaded()
        draft = self._draft
        cached = kv_bytes_per_token(model.spec, "float32")
        cached += 0 if draft is None else kv_bytes_per_token(draft.spec, "float32")
        of_draft = 0 if draft is None else 4 * draft.feature_width + 4  # the token that it has to read, too
        return -(-cached * session.block_slots(block_size) // block_size) + of_draft

    def allocate(self, num_blocks: int) -> None:
        session, model, options = self._loaded()
        spec = model.spec
        if num_blocks < 2:
            raise DoesNotFit(f"{num_blocks} cache blocks: the scratch block and at least one more are needed")
        session.cache(spec.num_layers, num_blocks, options.block_size, spec.num_kv_heads, spec.head_dim)
        if self._draft is not None:
            own = self._draft.spec
            session.cache(own.num_layers, num_blocks, options.block_size, own.num_kv_heads, own.head_dim, of="draft")
            if self._draft.feature_width:
                session.features(self._draft.feature_width)
        self._num_blocks = num_blocks

    def compile(self, shape: StepShape) -> None:
        session, model, options = self._loaded()
        if self._sealed:
            raise UncompiledShape(f"{shape} came after the last shape was compiled")
        if not self._num_blocks:
            raise DeviceError("compile before allocate: there is no cache")
        blocks_per_row = -(-shape.context // options.block_size)
        if blocks_per_row > -(-options.max_model_len // options.block_size):
            raise DoesNotFit(f"{shape} has a context above max_model_len {options.max_model_len}")
        if shape in self._programs:
            return
        assert self._recording is not None
        bound = self._recording.bind(shape, options.prompts_per_call)
        lean = self._lean.bind(shape, options.prompts_per_call) if self._lean and shape.prefill_tokens else None
        program = BoundProgram(shape, bound, options, model.spec.vocab_size, session, lean)
        self._results.reserve(program.num_rows, shape, options.max_prompt_logprobs)
        is_first = not self._programs
        self._programs[shape] = program
        # One real token through the first program shows that everything is in its place; for the others, whose
        # operations are the same, an empty step does.
        padding = padding_batch(shape, program.num_prompts, blocks_per_row, 1 if is_first else 0)
        program.run(padding, self._results)
        if self._draft_recording is not None:
            bound = self._draft_recording.bind_draft(shape, options.prompts_per_call, options.num_drafts)
            draft = DraftProgram(program, bound, options, model.spec.vocab_size, session)
            self._draft_programs[shape] = draft
            draft.warm(padding)

    def seal(self) -> None:
        self._sealed = True

    def run(self, batch: PackedBatch) -> DeviceOutput:
        started = time.perf_counter()
        program = self._programs.get(batch.shape)
        if program is None:
            self._loaded()
            raise UncompiledShape(f"{batch.shape} was never compiled; compiled are {len(self._programs)} others")
        self._ran = None
        program.run(batch, self._results)
        self._ran = batch.shape
        return program.output(batch, self._results, started)

    def draft(self, batch: PackedBatch, request: DraftRequest) -> Int32:
        program = self._draft_programs.get(batch.shape)
        if program is None:
            raise no_draft() if self._draft is None else UncompiledShape(f"{batch.shape} was never compiled")
        if self._ran is not batch.shape and self._ran != batch.shape:
            raise not_the_last(batch.shape)
        return program.run(batch, request)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        session, _, _ = self._loaded()
        blocks: NDArray[np.int64] = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        if blocks.size and not 0 <= blocks.min() <= blocks.max() < self._num_blocks:
            raise DoesNotFit(f"blocks {pairs} to copy; the cache has blocks 0 to {self._num_blocks - 1}")
        session.copy_blocks(blocks)

    def close(self) -> None:
        if self._session is not None:
            self._session.close()
        self._session = self._model = self._recording = self._lean = self._draft = self._draft_recording = self._ran = (
            None
        )
        self._programs.clear()
        self._draft_programs.clear()
        self._num_blocks, self._sealed = 0, False

    def _loaded(self) -> tuple[Session, Model, DeviceOptions]:
        if self._session is None or self._model is None or self._options is None:
            raise DeviceError("no model is loaded; call load first")
        return self._session, self._model, self._options


def _notes(options: DeviceOptions, session: Session, types: Set[str]) -> tuple[str, ...]:
    notes = [f"{session.num_threads} threads, {session.isa} kernels"]
    if options.dtype == "float32" and (kept := sorted(types & {"bfloat16", "float16"})):
        some = "weights" if types == set(kept) else "some weights"
        notes.append(f"{some} stay in {' and '.join(kept)}, which holds them: the same numbers in float32")
    if "float24" in types:
        some = "weights" if types == {"float24"} else "some weights"
        notes.append(f"{some} stay without their last byte, which is zero: the same numbers in float32")
    if options.dtype != "float32":
        notes.append(f"weights are kept in {options.dtype}, computed in float32")
    if options.quantization is not None and options.activations == "int8":
        notes.append("int8 weights times int8 activations, rounded for each token in blocks of 64")
    return tuple(notes)
