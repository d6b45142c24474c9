"""One shape's program and the arrays its steps answer in.

`BoundProgram.run` gives the library the addresses of a batch; `output` are views of what it wrote. A step makes a few
small Python objects and no array memory. Knows no model.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base import (
    DecodePart,
    DeviceOptions,
    DeviceOutput,
    Float32,
    Int32,
    PackedBatch,
    PrefillPart,
    PromptScores,
    RowSampling,
    StepShape,
    Want,
)
from ..errors import DoesNotFit
from .library import CACHES, Batch, Program, Session, address
from .native_ops import Bound


class Results:
    """Arrays for what a step gives back, as large as the largest shape needs; valid until the next step."""

    def __init__(self) -> None:
        self.tokens: Int32 = np.empty(0, dtype=np.int32)
        self.target_logprobs: Float32 = np.empty(0, dtype=np.float32)
        self.target_ranks: Int32 = np.empty(0, dtype=np.int32)
        self.top_ids: Int32 = np.empty(0, dtype=np.int32)
        self.top_logprobs: Float32 = np.empty(0, dtype=np.float32)
        self.most_alternatives = 0
        self.arrays: tuple[NDArray[Any], ...] = ()  # all of these; another tuple where one of them is another array

    def reserve(self, num_rows: int, shape: StepShape, most_alternatives: int) -> None:
        self.most_alternatives = max(most_alternatives, 0)
        self.tokens = _at_least(self.tokens, num_rows * shape.decode_width)
        self.target_logprobs = _at_least(self.target_logprobs, shape.prefill_tokens)
        self.target_ranks = _at_least(self.target_ranks, shape.prefill_tokens)
        self.top_ids = _at_least(self.top_ids, shape.prefill_tokens * self.most_alternatives)
        self.top_logprobs = _at_least(self.top_logprobs, shape.prefill_tokens * self.most_alternatives)
        self.arrays = (self.tokens, self.target_logprobs, self.target_ranks, self.top_ids, self.top_logprobs)

    def scores(self, num_tokens: int, alternatives: int) -> PromptScores:
        best = (num_tokens, alternatives)
        return PromptScores(
            target_logprobs=self.target_logprobs[:num_tokens],
            target_ranks=self.target_ranks[:num_tokens],
            top_ids=self.top_ids[: num_tokens * alternatives].reshape(best),
            top_logprobs=self.top_logprobs[: num_tokens * alternatives].reshape(best),
        )


def native_program(
    shape: StepShape, num_prompts: int, bound: Bound, options: DeviceOptions, vocab: int, cache: str = "model"
) -> Program:
    """`bound`'s operations are what it points at: keep them as long."""
    return Program(
        ops=address(bound.ops),
        num_ops=len(bound.ops),
        decode_rows=shape.decode_rows,
        decode_width=shape.decode_width,
        prefill_tokens=shape.prefill_tokens,
        prompts=num_prompts,
        context=min(shape.context, options.max_model_len),  # a last block may reach beyond the tables of positions
        blocks_per_row=-(-shape.context // options.block_size),
        vocab=vocab,
        queries_per_item=bound.queries_per_item,
        cache=CACHES.index(cache),
    )


class BoundProgram:
    """A recording bound to `shape`, with the session's memory reserved for it. `lean`: another one, for steps that
    score no prompt."""

    def __init__(
        self,
        shape: StepShape,
        bound: Bound,
        options: DeviceOptions,
        vocab: int,
        session: Session,
        lean: Bound | None = None,
    ) -> None:
        self.shape = shape
        self.num_prompts = options.prompts_per_call if shape.prefill_tokens else 0
        self.num_rows = shape.decode_rows + self.num_prompts
        self._full = (bound, native_program(shape, self.num_prompts, bound, options, vocab))
        self._lean = (
            self._full if lean is None else (lean, native_program(shape, self.num_prompts, lean, options, vocab))
        )
        self.latest = bound  # that ran last, once one has
        self._vocab = vocab
        self._session = session
        self.native_batch = Batch()
        self._parts: tuple[DecodePart | None, PrefillPart | None, RowSampling | None] = (None, None, None)
        self._answers: tuple[NDArray[Any], ...] | None = None
        self._tokens: Int32 = np.empty((0, 0), dtype=np.int32)  # of the answers, [N, W]
        for of, _ in (self._full, self._lean):
            session.reserve(of.workspace_bytes, of.scratch_bytes, len(of.ops), shape.num_tokens, max(self.num_rows, 1))

    @property
    def bounds(self) -> tuple[Bound, Bound]:
        return self._full[0], self._lean[0]

    def run(self, batch: PackedBatch, results: Results) -> None:
        if batch.prompt_logprobs > results.most_alternatives:
            raise DoesNotFit(
                f"{batch.prompt_logprobs} prompt logprobs, the device was loaded for {results.most_alternatives}; "
                "raise --max-logprobs"
            )
        self.point(batch)
        if results.arrays is not self._answers:
            self._answer_in(results)
        native = self.native_batch
        native.top_alternatives = batch.prompt_logprobs
        self.latest, program = self._full if _is_scored(batch) else self._lean
        self._session.run(program, native)

    def output(self, batch: PackedBatch, results: Results, started: float) -> DeviceOutput:
        """Views of the last run's results. `started` is when its call came, on the performance counter."""
        num_logits = self.native_batch.num_logit_rows
        return DeviceOutput(
            tokens=self._tokens,
            logits=self.logits(num_logits) if num_logits else None,
            prompt_scores=results.scores(self.shape.prefill_tokens, batch.prompt_logprobs)
            if self.native_batch.num_scored
            else None,
            device_seconds=time.perf_counter() - started,
        )

    def logits(self, num_rows: int) -> Float32:
        """Of the rows that wanted an output, in the order of the last run's results."""
        start, stride = self.latest.logits_offset // 4, self.latest.logits_stride
        rows = self._session.workspace[start : start + num_rows * stride]
        return rows.reshape(num_rows, stride)[:, : self._vocab]

    def _answer_in(self, results: Results) -> None:
        """Once all shapes are compiled the results, too, lie where they lay before."""
        native, num_tokens = self.native_batch, self.num_rows * self.shape.decode_width
        native.tokens = address(results.tokens)
        native.target_logprobs = address(results.target_logprobs) if self.shape.prefill_tokens else None
        native.target_ranks = address(results.target_ranks)
        native.top_ids = address(results.top_ids)
        native.top_logprobs = address(results.top_logprobs)
        self._tokens = results.tokens[:num_tokens].reshape(self.num_rows, self.shape.decode_width)
        self._answers = results.arrays

    def point(self, batch: PackedBatch) -> None:
        """A shape's buffers are the same at every step, so their addresses are looked up once."""
        parts = (batch.decode, batch.prefill, batch.sampling)
        if all(new is old for new, old in zip(parts, self._parts, strict=True)):
            return
        self._parts = (None, None, None)
        native, shape = self.native_batch, self.shape
        num_blocks, rows, width = self._full[1].blocks_per_row, shape.decode_rows, shape.decode_width
        if rows:
            decode = _given(batch.decode, "decode", shape)
            native.decode_tokens = checked(decode.tokens, "decode.tokens", (rows, width), np.int32)
            native.decode_positions = checked(decode.positions, "decode.positions", (rows,), np.int32)
            native.decode_lengths = checked(decode.lengths, "decode.lengths", (rows,), np.int32)
            native.decode_blocks = checked(decode.blocks, "decode.blocks", (rows, num_blocks), np.int32)
        if shape.prefill_tokens:
            prefill, tokens, prompts = _given(batch.prefill, "prefill", shape), shape.prefill_tokens, self.num_prompts
            native.prefill_tokens = checked(prefill.tokens, "prefill.tokens", (tokens,), np.int32)
            native.prefill_starts = checked(prefill.starts, "prefill.starts", (prompts,), np.int32)
            native.prefill_lengths = checked(prefill.lengths, "prefill.lengths", (prompts,), np.int32)
            native.prefill_positions = checked(prefill.positions, "prefill.positions", (prompts,), np.int32)
            native.prefill_blocks = checked(prefill.blocks, "prefill.blocks", (prompts, num_blocks), np.int32)
            native.targets = checked(prefill.targets, "prefill.targets", (tokens,), np.int32)
        sampling, num_rows = batch.sampling, (self.num_rows,)
        native.want = checked(sampling.want, "sampling.want", num_rows, np.int32)
        native.top_k = checked(sampling.top_k, "sampling.top_k", num_rows, np.int32)
        native.temperature = checked(sampling.temperature, "sampling.temperature", num_rows, np.float32)
        native.top_p = checked(sampling.top_p, "sampling.top_p", num_rows, np.float32)
        native.min_p = checked(sampling.min_p, "sampling.min_p", num_rows, np.float32)
        native.uniforms = checked(sampling.uniforms, "sampling.uniforms", (self.num_rows, width), np.float64)
        self._parts = parts


def padding_batch(shape: StepShape, num_prompts: int, blocks_per_row: int, num_tokens: int) -> PackedBatch:
    """A step of `num_tokens` (0 or 1) tokens, at position 0 of the scratch block."""
    rows, width = shape.decode_rows, shape.decode_width
    num_rows = rows + num_prompts

    def zeros(*size: int) -> Int32:
        return np.zeros(size, dtype=np.int32)

    decode = DecodePart(zeros(rows, width), zeros(rows), zeros(rows), zeros(rows, blocks_per_row)) if rows else None
    prefill = None
    if shape.prefill_tokens:
        tokens, targets = zeros(shape.prefill_tokens), zeros(shape.prefill_tokens) - 1
        prompts = (zeros(num_prompts), zeros(num_prompts), zeros(num_prompts), zeros(num_prompts, blocks_per_row))
        prefill = PrefillPart(tokens, *prompts, targets)
    want = np.full(num_rows, Want.NOTHING, dtype=np.int32)
    if num_tokens:
        lengths = decode.lengths if decode is not None else prefill.lengths if prefill is not None else zeros(1)
        lengths[0], want[0] = num_tokens, Want.TOKEN
    ones = np.ones(num_rows, dtype=np.float32)
    sampling = RowSampling(want, ones * 0, zeros(num_rows), ones, ones * 0, np.zeros((num_rows, width)))
    return PackedBatch(shape, decode, prefill, sampling)


def _is_scored(batch: PackedBatch) -> bool:
    return batch.prefill is not None and bool(batch.prefill.targets.max() >= 0)


def _given(part: Any, name: str, shape: StepShape) -> Any:
    if part is None:
        raise DoesNotFit(f"the batch has no {name} part, {shape} has one")
    return part


def checked(values: NDArray[Any], name: str, size: tuple[int, ...], dtype: type[np.generic]) -> int:
    """The array's address, if the library may read it as it expects."""
    if values.shape != size or values.dtype != dtype:
        raise DoesNotFit(f"{name} is {values.dtype} {values.shape}, the shape needs {np.dtype(dtype)} {size}")
    return address(values)


def _at_least(array: NDArray[Any], size: int) -> NDArray[Any]:
    return array if len(array) >= size else np.empty(size, dtype=array.dtype)
