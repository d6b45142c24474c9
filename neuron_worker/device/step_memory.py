"""A step's arrays in memory that both ends of a remote device see.

Every shape's arrays are laid over the same bytes, inputs before outputs: one step is in flight at a time, so the
next step's inputs may take the place of the last one's outputs. Where each array lies follows from the shape and
`StepLimits`; both ends compute it and nothing is sent. A step allocates nothing.

    the caller's end:   write(batch) ──▶ inputs        read(reply) ◀── outputs, without a copy
    the device's end:   batch(...) ◀── inputs          publish(output) ──▶ outputs

After a step its inputs stay where they are for a draft, whose own few arrays lie behind the outputs.

Knows no socket and no process.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import (
    DecodePart,
    DeviceOptions,
    DeviceOutput,
    DraftRequest,
    Int32,
    ModelFacts,
    PackedBatch,
    PrefillPart,
    PromptScores,
    RowSampling,
    StepShape,
)
from .errors import DeviceError, DoesNotFit
from .wire import BadMessage

HEAD_BYTES = 64
"""Before the arrays: one uint64 that the device's process increments while it lives, then what `step_line` keeps."""

_ALIGNMENT = 64

Array = NDArray[Any]


@dataclass(frozen=True)
class StepLimits:
    """What the sizes of a shape's arrays depend on besides the shape. From the options and the model's facts."""

    block_size: int
    prompts_per_call: int
    vocab_size: int
    max_prompt_logprobs: int
    num_drafts: int  # 0: no draft is loaded

    @classmethod
    def of(cls, options: DeviceOptions, facts: ModelFacts, draft_dir: str | None) -> StepLimits:
        num_drafts = 0 if draft_dir is None else options.num_drafts
        return cls(
            options.block_size, options.prompts_per_call, facts.vocab_size, options.max_prompt_logprobs, num_drafts
        )


@dataclass(frozen=True)
class _Field:
    name: str
    dtype: type[np.generic]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        size = np.dtype(self.dtype).itemsize
        for length in self.sizes:
            size *= length
        return -(-size // _ALIGNMENT) * _ALIGNMENT


def _inputs(shape: StepShape, limits: StepLimits) -> Iterator[_Field]:
    """The order of `PackedBatch`: decode part, prefill part, sampling."""
    i32, f32 = np.int32, np.float32
    rows, width, tokens = shape.decode_rows, shape.decode_width, shape.prefill_tokens
    prompts = limits.prompts_per_call if tokens else 0
    blocks = -(-shape.context // limits.block_size)
    if rows:
        yield _Field("decode.tokens", i32, (rows, width))
        yield _Field("decode.positions", i32, (rows,))
        yield _Field("decode.lengths", i32, (rows,))
        yield _Field("decode.blocks", i32, (rows, blocks))
    if tokens:
        yield _Field("prefill.tokens", i32, (tokens,))
        yield _Field("prefill.starts", i32, (prompts,))
        yield _Field("prefill.lengths", i32, (prompts,))
        yield _Field("prefill.positions", i32, (prompts,))
        yield _Field("prefill.blocks", i32, (prompts, blocks))
        yield _Field("prefill.targets", i32, (tokens,))
    count = rows + prompts
    yield _Field("sampling.want", i32, (count,))
    yield _Field("sampling.temperature", f32, (count,))
    yield _Field("sampling.top_k", i32, (count,))
    yield _Field("sampling.top_p", f32, (count,))
    yield _Field("sampling.min_p", f32, (count,))
    yield _Field("sampling.uniforms", np.float64, (count, width))


def _outputs(shape: StepShape, limits: StepLimits) -> Iterator[_Field]:
    rows, tokens = shape.decode_rows, shape.prefill_tokens
    prompts = limits.prompts_per_call if tokens else 0
    yield _Field("tokens", np.int32, (rows + prompts, shape.decode_width))
    if tokens:
        yield _Field("target_logprobs", np.float32, (tokens,))
        yield _Field("target_ranks", np.int32, (tokens,))
        yield _Field("top_ids", np.int32, (tokens * limits.max_prompt_logprobs,))
        yield _Field("top_logprobs", np.float32, (tokens * limits.max_prompt_logprobs,))
    yield _Field("logits", np.float32, (rows * shape.decode_width + prompts, limits.vocab_size))


def _draft_fields(shape: StepShape, limits: StepLimits) -> Iterator[_Field]:
    """A `DraftRequest`, and its answer."""
    rows = shape.decode_rows + (limits.prompts_per_call if shape.prefill_tokens else 0)
    yield _Field("draft.lengths", np.int32, (shape.decode_rows,))
    yield _Field("draft.newest", np.int32, (rows,))
    yield _Field("drafts", np.int32, (rows, limits.num_drafts))


def _all_fields(shape: StepShape, limits: StepLimits) -> tuple[_Field, ...]:
    return *_inputs(shape, limits), *_outputs(shape, limits), *_draft_fields(shape, limits)


def bytes_of(shape: StepShape, limits: StepLimits) -> int:
    """Memory that holds a step of `shape`, the head included."""
    fields = _all_fields(shape, limits)
    return HEAD_BYTES + sum(field.num_bytes for field in fields)


class SharedMemory:
    """Anonymous memory behind a file descriptor. It only grows, and views of it stay valid as long as they live."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, os.fstat(descriptor).st_size)

    @classmethod
    def create(cls) -> SharedMemory:
        descriptor = _anonymous_file()
        os.ftruncate(descriptor, HEAD_BYTES)
        return cls(descriptor)

    @property
    def num_bytes(self) -> int:
        return len(self._map)

    @property
    def buffer(self) -> mmap.mmap:
        return self._map

    @property
    def beats(self) -> NDArray[np.uint64]:
        """[1]"""
        return np.ndarray((1,), np.uint64, self._map)

    def grow(self, num_bytes: int) -> None:
        """At least this many bytes; the owner's affair."""
        if num_bytes > self.num_bytes:
            os.ftruncate(self.descriptor, num_bytes)
            self.refresh()

    def refresh(self) -> None:
        """See the memory as large as its owner made it."""
        size = os.fstat(self.descriptor).st_size
        if size > self.num_bytes:
            self._map = mmap.mmap(self.descriptor, size)  # the old map lives on in the views that hold it

    def close(self) -> None:
        """Views of it stay valid; the last one gone, so is the memory."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            del self._map
        self.descriptor = -1


def _anonymous_file() -> int:
    """Not under /dev/shm where it can be helped: containers keep that at 64 MiB."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("neuronserve-device")
    where = "/dev/shm" if os.path.isdir("/dev/shm") else None
    descriptor, path = tempfile.mkstemp(prefix="neuronserve-device-", dir=where)
    os.unlink(path)
    return descriptor


class StepMemory:
    """One shape's arrays in `memory`, which has room for them."""

    def __init__(self, shape: StepShape, limits: StepLimits, memory: SharedMemory) -> None:
        self.shape = shape
        self._limits = limits
        views, offset = {}, HEAD_BYTES
        for field in _all_fields(shape, limits):
            views[field.name] = np.ndarray(field.sizes, field.dtype, memory.buffer, offset)
            offset += field.num_bytes
        inputs = [views[field.name] for field in _inputs(shape, limits)]
        self._inputs = inputs
        self._views = views
        self._known_parts: tuple[object, ...] = (None, None, None)
        self._copies: list[tuple[memoryview, memoryview]] = []
        self._known_request: DraftRequest | None = None
        self._request_copies: list[tuple[memoryview, memoryview]] = []
        self._batch = _as_batch(shape, inputs)
        self.draft_request = DraftRequest(views["draft.lengths"], views["draft.newest"])
        self.drafts: Int32 = views["drafts"]
        self._tokens = views["tokens"]
        self._logits = views["logits"]
        self._most_logits = len(self._logits)

    def write(self, batch: PackedBatch) -> None:
        """Copy the caller's arrays in. Buffers seen before, as the packer's are, are not looked at again."""
        if batch.prompt_logprobs > self._limits.max_prompt_logprobs:
            raise DoesNotFit(
                f"prompt_logprobs={batch.prompt_logprobs}, the device was loaded with "
                f"max_prompt_logprobs={self._limits.max_prompt_logprobs}"
            )
        decode, prefill, sampling = self._known_parts
        if batch.decode is not decode or batch.prefill is not prefill or batch.sampling is not sampling:
            self._copies = self._check(_arrays(batch), self._inputs)
            self._known_parts = batch.decode, batch.prefill, batch.sampling
        for source, target in self._copies:
            target[:] = source

    def write_request(self, request: DraftRequest) -> None:
        if request is not self._known_request:
            places = [self.draft_request.lengths, self.draft_request.newest]
            self._request_copies = self._check([request.lengths, request.newest], places)
            self._known_request = request
        for source, target in self._request_copies:
            target[:] = source

    def _check(self, arrays: list[Array], places: list[Array]) -> list[tuple[memoryview, memoryview]]:
        """The caller's arrays and their places, as bytes: right after a step numpy's own copying is slow."""
        if len(arrays) != len(places):
            raise DeviceError(f"the step's parts are not those of {self.shape}")
        for source, target in zip(arrays, places, strict=True):
            if source.shape != target.shape or source.dtype != target.dtype or not source.flags.c_contiguous:
                got, wanted = f"{source.dtype}{source.shape}", f"{target.dtype}{target.shape}"
                raise DeviceError(f"an array of the step is {got}, {self.shape} has {wanted}, end to end")
        return [(_bytes_of(source), _bytes_of(target)) for source, target in zip(arrays, places, strict=True)]

    def batch(self, prompt_logprobs: int) -> PackedBatch:
        return replace(self._batch, prompt_logprobs=prompt_logprobs) if prompt_logprobs else self._batch

    def publish(self, output: DeviceOutput) -> tuple[int, int, float]:
        """Copy the device's arrays out; the reply's payload, which says which there are."""
        self._tokens[...] = output.tokens
        num_logits, num_scores = -1, -1
        if output.logits is not None:
            num_logits = len(output.logits)
            self._logits[:num_logits] = output.logits
        if output.prompt_scores is not None:
            num_scores = output.prompt_scores.top_ids.shape[1]
            own = self._scores(num_scores)
            for source, target in zip(_score_arrays(output.prompt_scores), _score_arrays(own), strict=True):
                target[...] = source
        return num_logits, num_scores, output.device_seconds

    def read(self, num_logits: int, num_scores: int, seconds: float) -> DeviceOutput:
        """The step's result as views of the memory, valid until the next `write`."""
        if num_logits > self._most_logits or num_scores > self._limits.max_prompt_logprobs:
            raise BadMessage(f"a step's reply tells of more than was asked: {(num_logits, num_scores)}")
        return DeviceOutput(
            self._tokens,
            None if num_logits < 0 else self._logits[:num_logits],
            None if num_scores < 0 else self._scores(num_scores),
            seconds,
        )

    def _scores(self, kept: int) -> PromptScores:
        views, total = self._views, self.shape.prefill_tokens
        return PromptScores(
            views["target_logprobs"],
            views["target_ranks"],
            views["top_ids"][: total * kept].reshape(total, kept),
            views["top_logprobs"][: total * kept].reshape(total, kept),
        )


def _as_batch(shape: StepShape, inputs: list[Array]) -> PackedBatch:
    """`inputs` in the order of `_inputs`."""
    rest = iter(inputs)

    def take(count: int) -> list[Array]:
        return [next(rest) for _ in range(count)]

    return PackedBatch(
        shape,
        DecodePart(*take(4)) if shape.decode_rows else None,
        PrefillPart(*take(6)) if shape.prefill_tokens else None,
        RowSampling(*take(6)),
    )


def _bytes_of(array: Array) -> memoryview:
    return memoryview(array.reshape(-1).view(np.uint8))  # type: ignore[arg-type]


def _arrays(batch: PackedBatch) -> list[Array]:
    """A batch's arrays in the order of `_inputs`."""
    arrays: list[Array] = []
    if (decode := batch.decode) is not None:
        arrays += (decode.tokens, decode.positions, decode.lengths, decode.blocks)
    if (prefill := batch.prefill) is not None:
        arrays += (prefill.tokens, prefill.starts, prefill.lengths, prefill.positions, prefill.blocks, prefill.targets)
    how = batch.sampling
    arrays += (how.want, how.temperature, how.top_k, how.top_p, how.min_p, how.uniforms)
    return arrays


def _score_arrays(scores: PromptScores) -> tuple[Array, ...]:
    return scores.target_logprobs, scores.target_ranks, scores.top_ids, scores.top_logprobs
