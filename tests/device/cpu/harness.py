"""Runs pieces of a graph on the C kernels alone, and reads any value back.

Rows of numbers enter as an embedding table whose token ids are 0, 1, 2, …; what the graph returns is pinned in the
workspace like logits, and comes out as an array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest

from neuronserve.neuron_worker.device.base import (
    DecodePart,
    DeviceOptions,
    PackedBatch,
    PrefillPart,
    RowSampling,
    StepShape,
)
from neuronserve.neuron_worker.device.cpu.library import SETS, NativeMissing, Session, load
from neuronserve.neuron_worker.device.cpu.native_ops import NativeOps, Value
from neuronserve.neuron_worker.device.cpu.packer import NativePacker, Table
from neuronserve.neuron_worker.device.cpu.program import BoundProgram, Results
from neuronserve.neuron_worker.device.graph.ops import FloatType

Graph = Callable[[NativeOps, Value], Value]


def int8_sets() -> dict[str, str]:
    """Those of this machine, with the set that all else of their kernels is of; none where nothing can be compiled."""
    found = {}
    for name in SETS:
        try:
            load()
            session = Session(1, name)
            found[name] = session.panel_isa
            session.close()
        except NativeMissing:
            pass
    return found


def instruction_sets() -> list[str]:
    return list(dict.fromkeys(int8_sets().values()))


def keeps(kind: str, isa: str = "") -> bool:
    """`Session.keeps`; False where nothing can be compiled."""
    try:
        session = Session(1, isa)
    except NativeMissing:
        return False
    kept = session.keeps(kind)
    session.close()
    return kept


every_set = pytest.mark.parametrize("isa", instruction_sets())
every_int8_set = pytest.mark.parametrize("isa", int8_sets())


@dataclass(frozen=True)
class Array:
    """A `Matrix` in memory."""

    values: np.ndarray
    dtype: FloatType = "float32"
    name: str = "array"

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.ascontiguousarray(self.values[start:stop], dtype=np.float32)

    def mapped(self) -> None:
        return None


@dataclass(frozen=True)
class Piece:
    """A run of rows of one sequence, at `position`, in `blocks`."""

    rows: np.ndarray  # [tokens, width]
    position: int = 0
    blocks: Sequence[int] = (1,)
    is_decode: bool = False


class Bench:
    """A session with a cache, and a graph to run on rows given from outside."""

    def __init__(
        self,
        isa: str,
        threads: int = 1,
        dtype: FloatType = "float32",
        block_size: int = 16,
        activations: str = "float32",
    ) -> None:
        self.session = Session(threads, isa)
        self.packer = NativePacker(self.session, dtype, activations)
        self.block_size = block_size
        self._kept: list[object] = []  # what the library has addresses of; threads may look at it after a step
        self.cache(2, 1, 8)

    def cache(self, num_blocks: int, heads: int, head_dim: int, layers: int = 1) -> None:
        self.session.cache(layers, num_blocks, self.block_size, heads, head_dim)

    def rows(self, graph: Graph, x: np.ndarray) -> np.ndarray:
        """The graph of independent rows."""
        return self.step(graph, [Piece(x)], context=max(len(x), self.block_size))

    def step(self, graph: Graph, pieces: Sequence[Piece], context: int) -> np.ndarray:
        """One step of several sequences, decode pieces first; rows of the result in the order of the pieces."""
        table = np.concatenate([piece.rows for piece in pieces]).astype(np.float32)
        recorder, entry = NativeOps(), Table(table, "float32", table.shape[1])
        y = graph(recorder, recorder.embed(entry))
        recording = recorder.recording
        recording.logits, recording.slice_start = y, len(recording.ops)
        decodes = [piece for piece in pieces if piece.is_decode]
        prompts = [piece for piece in pieces if not piece.is_decode]
        shape = StepShape(
            decode_rows=len(decodes),
            decode_width=max((len(piece.rows) for piece in decodes), default=1),
            prefill_tokens=sum(len(piece.rows) for piece in prompts),
            context=context,
        )
        options = DeviceOptions(64, context, self.block_size, max(len(prompts), 1))
        bound = recording.bind(shape, max(len(prompts), 1))
        program = BoundProgram(shape, bound, options, len(table), self.session)
        self.keep(entry, program)
        results = Results()
        results.reserve(program.num_rows, shape, 0)
        program.run(_batch(shape, decodes, prompts, program.num_rows, self.block_size), results)
        start, stride = bound.logits_offset // 4, bound.logits_stride
        memory = self.session.workspace[start : start + len(table) * stride]
        return memory.reshape(len(table), stride)[:, : y.width].copy()

    def keep(self, *objects: object) -> None:
        self._kept += objects

    def close(self) -> None:
        self.session.close()


@dataclass(frozen=True)
class Sampled:
    tokens: np.ndarray
    target_logprobs: np.ndarray
    target_ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def sample(
    bench: Bench, logits: np.ndarray, rows: RowSampling, targets: np.ndarray | None = None, best: int = 0
) -> Sampled:
    """Tokens of rows of logits by `rows`; or, with `targets`, the scores of the rows as prompt positions."""
    count, vocabulary = logits.shape
    table, recorder = Table(logits, "float32", vocabulary), NativeOps()
    x = recorder.embed(table)
    # A head of weight 1 over a norm would change the numbers: the rows themselves stand for the head's output.
    if targets is None:
        recorder._record("sample", {"in": vocabulary}, x=recorder.select(x))
        shape, num_prompts = StepShape(count, 1, 0, bench.block_size), 0
    else:
        shape, num_prompts = StepShape(0, 1, count, count), 1
    recorder.recording.logits, recorder.recording.slice_start = x, len(recorder.recording.ops)
    if targets is not None:
        gathered = recorder._record("gather", {"in": vocabulary}, x=x, y=recorder._value(vocabulary, "slice"))
        recorder._record("score", {"in": vocabulary}, x=gathered)
    bound = recorder.recording.bind(shape, num_prompts)
    options = DeviceOptions(count, max(count, bench.block_size), bench.block_size, 1)
    program = BoundProgram(shape, bound, options, max(vocabulary, count), bench.session)
    results = Results()
    results.reserve(program.num_rows, shape, best)
    batch = _batch(shape, *_pieces(count, targets is None), program.num_rows, bench.block_size)
    if targets is not None and batch.prefill is not None:
        batch.prefill.targets[:] = targets
    bench.keep(table, program)
    program.run(replace(batch, sampling=rows, prompt_logprobs=best), results)
    scored = results.scores(shape.prefill_tokens, best)
    return Sampled(
        results.tokens[: program.num_rows].reshape(-1, 1),
        *(scored.target_logprobs, scored.target_ranks, scored.top_ids, scored.top_logprobs),
    )


def _pieces(count: int, is_decode: bool) -> tuple[list[Piece], list[Piece]]:
    if is_decode:
        return [Piece(np.zeros((1, 1)), 0, (1,), True) for _ in range(count)], []
    return [], [Piece(np.zeros((count, 1)), 0, (1,) * count)]


def _batch(
    shape: StepShape, decodes: Sequence[Piece], prompts: Sequence[Piece], num_rows: int, block_size: int
) -> PackedBatch:
    num_blocks, ids = -(-shape.context // block_size), iter(range(1 << 20))

    def ints(*size: int) -> np.ndarray:
        return np.zeros(size, np.int32)

    def tables(pieces: Sequence[Piece], places: int) -> np.ndarray:
        blocks = ints(places, num_blocks)
        for index, piece in enumerate(pieces):
            blocks[index, : len(piece.blocks)] = piece.blocks[:num_blocks]
        return blocks

    tokens = ints(len(decodes), shape.decode_width)
    for index, piece in enumerate(decodes):
        tokens[index, : len(piece.rows)] = [next(ids) for _ in piece.rows]
    decode = DecodePart(
        tokens,
        np.array([piece.position for piece in decodes], np.int32),
        np.array([len(piece.rows) for piece in decodes], np.int32),
        tables(decodes, len(decodes)),
    )
    lengths = np.array([len(piece.rows) for piece in prompts], np.int32)
    prefill = PrefillPart(
        np.array([next(ids) for _ in range(shape.prefill_tokens)], np.int32),
        (np.cumsum(lengths) - lengths).astype(np.int32),
        lengths,
        np.array([piece.position for piece in prompts], np.int32),
        tables(prompts, len(prompts)),
        ints(shape.prefill_tokens) - 1,
    )
    ones = np.ones(num_rows, np.float32)
    sampling = RowSampling(
        ints(num_rows), ones * 0, ints(num_rows), ones, ones * 0, np.zeros((num_rows, shape.decode_width))
    )
    return PackedBatch(shape, decode if decodes else None, prefill if prompts else None, sampling)
