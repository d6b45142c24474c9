"""Drives any device through steps written as tables, so that every backend runs the same tests.

A `Stream` is one request: its tokens, the cache blocks it owns, how many tokens are computed. A step is a list of
rows; the driver packs them into a shape (with padding around them unless told otherwise) and gives back one
`RowResult` each. It packs on its own, so that a test of a device does not rest on the packer's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from neuronserve.neuron_worker.device.base import (
    DecodePart,
    Device,
    DeviceOutput,
    DraftRequest,
    PackedBatch,
    PrefillPart,
    RowSampling,
    StepShape,
    Want,
)


@dataclass(frozen=True)
class Sampling:
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniforms: tuple[float, ...] = ()


GREEDY = Sampling()


@dataclass
class Stream:
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0


@dataclass(frozen=True)
class StepRow:
    """`count` tokens of the stream from where it stands."""

    stream: Stream
    count: int
    is_decode: bool
    want: Want = Want.LOGITS
    sampling: Sampling = GREEDY
    scored: bool = False  # log-probabilities of the tokens after each of these


@dataclass(frozen=True)
class RowResult:
    position: int  # of the row's first token
    tokens: np.ndarray  # [count] of a decode row, [1] of a prompt
    logits: np.ndarray | None  # the same by vocabulary
    target_logprobs: np.ndarray | None = None  # [count]
    target_ranks: np.ndarray | None = None
    top_ids: np.ndarray | None = None  # [count, K]
    top_logprobs: np.ndarray | None = None


def prefill(stream: Stream, count: int, **how: object) -> StepRow:
    return StepRow(stream, count, is_decode=False, **how)  # type: ignore[arg-type]


def decode(stream: Stream, count: int = 1, **how: object) -> StepRow:
    return StepRow(stream, count, is_decode=True, **how)  # type: ignore[arg-type]


class Driver:
    """A loaded device with a cache; blocks are handed out in a shuffled order."""

    def __init__(
        self,
        device: Device,
        *,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        prompts_per_call: int = 4,
        num_drafts: int = 0,
    ) -> None:
        self.device = device
        self.num_drafts = num_drafts  # of a draft that was loaded; a stream then has blocks for them
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.prompts_per_call = prompts_per_call
        device.allocate(num_blocks)
        self._free = list(range(1, num_blocks))
        random.Random(num_blocks).shuffle(self._free)
        self._compiled: set[StepShape] = set()
        self._last: tuple[Sequence[StepRow], PackedBatch] | None = None

    def step(
        self, rows: Sequence[StepRow], shape: StepShape | None = None, prompt_logprobs: int = 0
    ) -> list[RowResult]:
        """Run the rows (decode rows before prompts) in one call and move their streams on."""
        for row in rows:
            end = row.stream.computed + row.count + self.num_drafts
            self.give_blocks(row.stream, min(end, self.max_model_len))
        shape = shape or self.padded_shape(rows)
        self.compile(shape)
        batch = self.pack(rows, shape, prompt_logprobs)
        self._last = rows, batch
        output = self.device.run(batch)
        results = _results(rows, shape, output)
        for row in rows:
            row.stream.computed += row.count
        return results

    def draft(self, newest: Sequence[int], standing: Sequence[int] | None = None) -> list[list[int]]:
        """After a step, for each of its rows: the token that follows (-1: none), and how many of its tokens stand
        (all of them)."""
        assert self._last is not None
        rows, batch = self._last
        lengths, tokens = _zeros(batch.shape.decode_rows), _zeros(len(batch.sampling.want)) - 1
        next_place, places = {True: 0, False: batch.shape.decode_rows}, []
        for index, row in enumerate(rows):
            place = next_place[row.is_decode]
            next_place[row.is_decode] += 1
            places.append(place)
            tokens[place] = newest[index]
            if row.is_decode:
                lengths[place] = row.count if standing is None else standing[index]
        drafts = self.device.draft(batch, DraftRequest(lengths, tokens))
        unused = [place for place in range(len(tokens)) if tokens[place] < 0]
        assert (drafts[unused] == -1).all()
        return [drafts[place].tolist() for place in places]

    def compile(self, shape: StepShape) -> None:
        if shape not in self._compiled:
            self.device.compile(shape)
            self._compiled.add(shape)

    def padded_shape(self, rows: Sequence[StepRow]) -> StepShape:
        """A row and some tokens more than needed, and the whole context."""
        decodes = [row for row in rows if row.is_decode]
        prompt_tokens = sum(row.count for row in rows if not row.is_decode)
        return StepShape(
            decode_rows=len(decodes) + 1 if decodes else 0,
            decode_width=max((row.count for row in decodes), default=1),
            prefill_tokens=prompt_tokens + 3 if prompt_tokens else 0,
            context=self.max_model_len,
        )

    def tight_shape(self, rows: Sequence[StepRow]) -> StepShape:
        """No padding at all where the rows are equally long."""
        decodes = [row for row in rows if row.is_decode]
        return StepShape(
            decode_rows=len(decodes),
            decode_width=max((row.count for row in decodes), default=1),
            prefill_tokens=sum(row.count for row in rows if not row.is_decode),
            context=max(row.stream.computed + row.count for row in rows),
        )

    def pack(self, rows: Sequence[StepRow], shape: StepShape, prompt_logprobs: int = 0) -> PackedBatch:
        decodes = [row for row in rows if row.is_decode]
        prompts = [row for row in rows if not row.is_decode]
        return PackedBatch(
            shape,
            self._decode_part(decodes, shape) if shape.decode_rows else None,
            self._prefill_part(prompts, shape) if shape.prefill_tokens else None,
            self._sampling(decodes, prompts, shape),
            prompt_logprobs,
        )

    def _decode_part(self, rows: Sequence[StepRow], shape: StepShape) -> DecodePart:
        tokens, positions = _zeros(shape.decode_rows, shape.decode_width), _zeros(shape.decode_rows)
        lengths = _zeros(shape.decode_rows)
        for index, row in enumerate(rows):
            tokens[index, : row.count] = _tokens(row)
            positions[index], lengths[index] = row.stream.computed, row.count
        return DecodePart(tokens, positions, lengths, self._blocks(rows, shape.decode_rows, shape))

    def _prefill_part(self, rows: Sequence[StepRow], shape: StepShape) -> PrefillPart:
        places = self.prompts_per_call
        tokens, targets = _zeros(shape.prefill_tokens), _zeros(shape.prefill_tokens) - 1
        starts, lengths, positions = _zeros(places), _zeros(places), _zeros(places)
        start = 0
        for index, row in enumerate(rows):
            end, first = start + row.count, row.stream.computed
            tokens[start:end] = _tokens(row)
            starts[index], lengths[index], positions[index] = start, row.count, first
            if row.scored:
                following = row.stream.tokens[first + 1 : first + row.count + 1]
                targets[start : start + len(following)] = following
            start = end
        return PrefillPart(tokens, starts, lengths, positions, self._blocks(rows, places, shape), targets)

    def _blocks(self, rows: Sequence[StepRow], places: int, shape: StepShape) -> np.ndarray:
        blocks = _zeros(places, -(-shape.context // self.block_size))
        for index, row in enumerate(rows):
            used = row.stream.blocks[: blocks.shape[1]]
            blocks[index, : len(used)] = used
        return blocks

    def _sampling(self, decodes: Sequence[StepRow], prompts: Sequence[StepRow], shape: StepShape) -> RowSampling:
        count = shape.decode_rows + (self.prompts_per_call if shape.prefill_tokens else 0)
        sampling = RowSampling(
            want=_zeros(count),
            temperature=np.zeros(count, np.float32),
            top_k=_zeros(count),
            top_p=np.ones(count, np.float32),
            min_p=np.zeros(count, np.float32),
            uniforms=np.zeros((count, shape.decode_width)),
        )
        for first, rows in ((0, decodes), (shape.decode_rows, prompts)):
            for place, row in enumerate(rows, first):
                how = row.sampling
                sampling.want[place], sampling.temperature[place] = row.want, how.temperature
                sampling.top_k[place], sampling.top_p[place], sampling.min_p[place] = how.top_k, how.top_p, how.min_p
                sampling.uniforms[place, : len(how.uniforms)] = how.uniforms
        return sampling

    def give_blocks(self, stream: Stream, length: int) -> None:
        while len(stream.blocks) * self.block_size < length:
            stream.blocks.append(self._free.pop())


def _results(rows: Sequence[StepRow], shape: StepShape, output: DeviceOutput) -> list[RowResult]:
    results = []
    next_place = {True: 0, False: shape.decode_rows}
    next_logits = next_score = 0
    for row in rows:
        place, count = next_place[row.is_decode], row.count if row.is_decode else 1
        next_place[row.is_decode] += 1
        logits = None
        if row.want == Want.LOGITS:
            assert output.logits is not None
            logits = output.logits[next_logits : next_logits + count].copy()
            next_logits += count
        scores: dict[str, np.ndarray] = {}
        if not row.is_decode:
            if row.scored and output.prompt_scores is not None:
                names = ("target_logprobs", "target_ranks", "top_ids", "top_logprobs")
                piece = slice(next_score, next_score + row.count)
                scores = {name: getattr(output.prompt_scores, name)[piece].copy() for name in names}
            next_score += row.count
        results.append(RowResult(row.stream.computed, output.tokens[place, :count].copy(), logits, **scores))
    return results


def _tokens(row: StepRow) -> list[int]:
    return row.stream.tokens[row.stream.computed : row.stream.computed + row.count]


def _zeros(*sizes: int) -> np.ndarray:
    return np.zeros(sizes, np.int32)
