"""Rows in, arrays of exactly a shape's size out; and device output back to rows.

Buffers are made once per shape, before the first request; a step writes only what changed since the last step
of the same shape. The order is decode rows as given, then prompts as given; output row N = R + P, where P is
`prompts_per_call` in a shape with a prefill part and 0 in one without.

Padding: lengths 0, tokens and positions 0, the scratch block, want nothing, no target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from neuronserve.neuron_worker.device.base import (
    SCRATCH_BLOCK,
    DecodePart,
    DeviceOutput,
    DraftRequest,
    Float32,
    Float64,
    Int32,
    PackedBatch,
    PrefillPart,
    PromptScores,
    RowSampling,
    StepShape,
    Want,
)

from .errors import DoesNotFit
from .row import Row

NO_TARGET = -1
NO_DRAFT = -1

_ending_of = attrgetter("want", "temperature", "top_k", "top_p", "min_p")


class StepPacker:
    """Not thread-safe: one step at a time, and a packed batch is valid until the next `pack` of its shape."""

    def __init__(self, block_size: int, prompts_per_call: int) -> None:
        self._block_size = block_size
        self._prompts_per_call = prompts_per_call
        self._buffers: dict[StepShape, _Buffers] = {}

    def prepare(self, shape: StepShape) -> PackedBatch:
        """Allocate the shape's buffers, once. The batch it returns is all padding."""
        if shape not in self._buffers:
            self._buffers[shape] = _Buffers(shape, self._block_size, self._prompts_per_call)
        return self._buffers[shape].batch

    def pack(self, rows: Sequence[Row], shape: StepShape) -> PackedBatch:
        """`rows` in the arrays of a prepared shape that holds them."""
        buffers = self._buffers.get(shape)
        if buffers is None:
            raise KeyError(f"{shape} has no buffers; call prepare(shape) before the first step")
        return buffers.fill(rows)

    def pack_draft(
        self, rows: Sequence[Row], shape: StepShape, standing: Sequence[int], newest: Sequence[int]
    ) -> DraftRequest:
        """After a step of `rows`: how many tokens of each stand (a prompt's all do), and the token that follows them,
        `NO_DRAFT` where nothing is to be drafted. `rows` is what `pack` was given."""
        return self._buffers[shape].fill_draft(rows, standing, newest)


class _Buffers:
    """One shape's arrays, and how much of them the last step used."""

    def __init__(self, shape: StepShape, block_size: int, prompts_per_call: int) -> None:
        num_blocks = -(-shape.context // block_size)  # C
        num_rows, width = shape.decode_rows, shape.decode_width  # R, W
        self.num_prompts = prompts_per_call if shape.prefill_tokens else 0  # P
        self.shape = shape
        self.decode = _empty_decode(num_rows, width, num_blocks)
        self.prefill = _empty_prefill(shape.prefill_tokens, self.num_prompts, num_blocks)
        self.sampling = _empty_sampling(num_rows + self.num_prompts, width)
        self.batch = PackedBatch(
            shape,
            self.decode if num_rows else None,
            self.prefill if self.num_prompts else None,
            self.sampling,
        )
        self.draft = DraftRequest(_zeros(num_rows), _zeros(num_rows + self.num_prompts) + NO_DRAFT)
        self._decodes = _Table(self.decode.blocks)
        self._prompts = _Table(self.prefill.blocks)
        self._endings: dict[int, list[object]] = {}  # by a part's first output row
        self._prompt_tokens = 0
        self._has_targets = False
        self._has_uniforms = False

    def fill(self, rows: Sequence[Row]) -> PackedBatch:
        decodes = [row for row in rows if row.is_decode]
        prompts = [row for row in rows if not row.is_decode] if len(decodes) < len(rows) else []
        self._check(decodes, prompts)
        if self.shape.decode_rows:
            self._fill_decode(decodes)
        if self.num_prompts:
            self._fill_prefill(prompts)
        self._fill_uniforms(decodes, prompts)
        prompt_logprobs = max((row.prompt_logprobs for row in prompts), default=0)
        return replace(self.batch, prompt_logprobs=prompt_logprobs) if prompt_logprobs else self.batch

    def fill_draft(self, rows: Sequence[Row], standing: Sequence[int], newest: Sequence[int]) -> DraftRequest:
        lengths, tokens = self.draft.lengths, self.draft.newest
        lengths.fill(0)
        tokens.fill(NO_DRAFT)
        for row, place, count, token in zip(rows, places(rows, self.shape), standing, newest, strict=True):
            tokens[place] = token
            if row.is_decode:
                lengths[place] = count
        return self.draft

    def _check(self, decodes: Sequence[Row], prompts: Sequence[Row]) -> None:
        """All of it before the first write: a refused step leaves the buffers as they were."""
        shape = self.shape
        limits = (
            ("decode rows", len(decodes), shape.decode_rows),
            ("tokens in a decode row", max([len(row.tokens) for row in decodes], default=0), shape.decode_width),
            ("prompts", len(prompts), self.num_prompts),
            ("prompt tokens", sum([len(row.tokens) for row in prompts]), shape.prefill_tokens),
            (
                "positions",
                max([row.position + len(row.tokens) for row in (*decodes, *prompts)], default=0),
                shape.context,
            ),
        )
        for what, wanted, limit in limits:
            if wanted > limit:
                raise DoesNotFit(f"{wanted} {what}, {shape} holds {limit}; choose the shape by the rows' demand")

    def _fill_decode(self, rows: Sequence[Row]) -> None:
        part, used, before = self.decode, len(rows), self._decodes.num_rows
        lengths = [len(row.tokens) for row in rows]
        if self.shape.decode_width == 1:
            part.tokens[:used, 0] = [row.tokens[0] for row in rows]
        else:
            part.tokens[: max(used, before)] = 0
            for index, row in enumerate(rows):
                part.tokens[index, : lengths[index]] = row.tokens
        part.positions[:used] = [row.position for row in rows]
        part.lengths[:used] = lengths
        if used < before:
            part.tokens[used:before] = part.positions[used:before] = part.lengths[used:before] = 0
        self._fill_sampling(rows, 0, before)
        self._decodes.fill(rows)

    def _fill_prefill(self, rows: Sequence[Row]) -> None:
        part, used, before = self.prefill, len(rows), self._prompts.num_rows
        has_targets = any(row.targets is not None for row in rows)
        if self._has_targets:
            part.targets[: self._prompt_tokens] = NO_TARGET
        starts, end = [], 0
        for row in rows:
            start, end = end, end + len(row.tokens)
            starts.append(start)
            part.tokens[start:end] = row.tokens
            if row.targets is not None:
                part.targets[start:end] = row.targets
        part.tokens[end : self._prompt_tokens] = 0
        part.starts[:used] = starts
        part.lengths[:used] = [len(row.tokens) for row in rows]
        part.positions[:used] = [row.position for row in rows]
        if used < before:
            part.starts[used:before] = part.lengths[used:before] = part.positions[used:before] = 0
        self._fill_sampling(rows, self.shape.decode_rows, before)
        self._prompts.fill(rows)
        self._prompt_tokens, self._has_targets = end, has_targets

    def _fill_sampling(self, rows: Sequence[Row], first: int, before: int) -> None:
        """Output rows from `first` on, of which the last step used `before`."""
        endings: list[object] = list(map(_ending_of, rows))
        if endings == self._endings.get(first):
            return
        s, end = self.sampling, first + len(rows)
        s.want[first:end] = [row.want for row in rows]
        s.temperature[first:end] = [row.temperature for row in rows]
        s.top_k[first:end] = [row.top_k for row in rows]
        s.top_p[first:end] = [row.top_p for row in rows]
        s.min_p[first:end] = [row.min_p for row in rows]
        if len(rows) < before:
            stale = slice(end, first + before)
            s.want[stale] = Want.NOTHING
            s.temperature[stale] = s.min_p[stale] = s.top_k[stale] = 0
            s.top_p[stale] = 1
        self._endings[first] = endings

    def _fill_uniforms(self, decodes: Sequence[Row], prompts: Sequence[Row]) -> None:
        table = self.sampling.uniforms
        if self._has_uniforms:
            table.fill(0)
        self._has_uniforms = False
        for first, rows in ((0, decodes), (self.shape.decode_rows, prompts)):
            for index, row in enumerate(rows, first):
                if row.uniforms:
                    # A prompt's only draw is for the token after its last one.
                    values = row.uniforms if row.is_decode else row.uniforms[-1:]
                    table[index, : len(values)] = values
                    self._has_uniforms = True


class _Table:
    """The block table of one part, what was written there last, and how far each of its rows is in use."""

    def __init__(self, blocks: Int32) -> None:
        self._blocks = blocks  # [rows, C]
        self._written: list[Int32 | None] = [None] * len(blocks)
        self._used = [0] * len(blocks)
        self.num_rows = 0

    def fill(self, rows: Sequence[Row]) -> None:
        width = self._blocks.shape[1]
        used, written = self._used, self._written
        for index, row in enumerate(rows):
            if row.blocks is written[index]:
                continue
            # A row may own blocks past this step's context; the graph has no place for them and no need.
            count = min(len(row.blocks), width)
            self._blocks[index, :count] = row.blocks[:count]
            if used[index] > count:
                self._blocks[index, count : used[index]] = SCRATCH_BLOCK
            used[index], written[index] = count, row.blocks
        for index in range(len(rows), self.num_rows):
            self._blocks[index, : used[index]] = SCRATCH_BLOCK
            used[index], written[index] = 0, None
        self.num_rows = len(rows)


def _empty_decode(num_rows: int, width: int, num_blocks: int) -> DecodePart:
    return DecodePart(
        tokens=_zeros(num_rows, width),
        positions=_zeros(num_rows),
        lengths=_zeros(num_rows),
        blocks=_zeros(num_rows, num_blocks) + SCRATCH_BLOCK,
    )


def _empty_prefill(num_tokens: int, num_prompts: int, num_blocks: int) -> PrefillPart:
    return PrefillPart(
        tokens=_zeros(num_tokens),
        starts=_zeros(num_prompts),
        lengths=_zeros(num_prompts),
        positions=_zeros(num_prompts),
        blocks=_zeros(num_prompts, num_blocks) + SCRATCH_BLOCK,
        targets=_zeros(num_tokens) + NO_TARGET,
    )


def _empty_sampling(num_rows: int, width: int) -> RowSampling:
    return RowSampling(
        want=_zeros(num_rows) + int(Want.NOTHING),
        temperature=np.zeros(num_rows, dtype=np.float32),
        top_k=_zeros(num_rows),
        top_p=np.ones(num_rows, dtype=np.float32),
        min_p=np.zeros(num_rows, dtype=np.float32),
        uniforms=_no_uniforms(num_rows, width),
    )


def _no_uniforms(num_rows: int, width: int) -> Float64:
    return np.zeros((num_rows, width), dtype=np.float64)


def _zeros(*sizes: int) -> Int32:
    return np.zeros(sizes, dtype=np.int32)


class RowOutput(NamedTuple):
    """What a step gave one row. Arrays are views of the device's: valid until its next `run`."""

    tokens: list[int]  # n of a decode row, one of a prompt; -1 where no token was wanted
    logits: Float32 | None  # [the same, vocabulary], where logits were wanted
    prompt_scores: PromptScores | None  # the prompt's own part


def places(rows: Sequence[Row], shape: StepShape) -> list[int]:
    """Each row's place among a step's output rows."""
    result = []
    next_decode, next_prompt = 0, shape.decode_rows
    for row in rows:
        result.append(next_decode if row.is_decode else next_prompt)
        next_decode += row.is_decode
        next_prompt += not row.is_decode
    return result


def unpack(output: DeviceOutput, rows: Sequence[Row], shape: StepShape) -> list[RowOutput]:
    """One output per row, in the order `rows` were given to `pack`."""
    results: list[RowOutput] = []
    next_score = 0
    tokens: list[list[int]] = output.tokens.tolist()
    logits = _logits_of(output, rows)
    for index, (row, place) in enumerate(zip(rows, places(rows, shape), strict=True)):
        scores = None
        count = len(row.tokens) + row.fused_drafts if row.is_decode else 1
        if not row.is_decode:
            if output.prompt_scores is not None and row.targets is not None:
                scores = _slice_scores(output.prompt_scores, next_score, next_score + len(row.tokens))
            next_score += len(row.tokens)
        results.append(RowOutput(tokens[place][:count], logits[index], scores))
    return results


def _logits_of(output: DeviceOutput, rows: Sequence[Row]) -> list[Float32 | None]:
    """Logits lie end to end, decode rows before prompts, only of rows that wanted them."""
    result: list[Float32 | None] = [None] * len(rows)
    if output.logits is None:
        return result
    start = 0
    for is_decode in (True, False):
        for index, row in enumerate(rows):
            if row.is_decode is is_decode and row.want == Want.LOGITS:
                end = start + (len(row.tokens) if is_decode else 1)
                result[index] = output.logits[start:end]
                start = end
    return result


def _slice_scores(scores: PromptScores, start: int, end: int) -> PromptScores:
    return PromptScores(
        target_logprobs=scores.target_logprobs[start:end],
        target_ranks=scores.target_ranks[start:end],
        top_ids=scores.top_ids[start:end],
        top_logprobs=scores.top_logprobs[start:end],
    )
