"""Packing: what lands where, nothing stale from the step before, and the way back to rows."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuronserve.bucketing.errors import DoesNotFit
from neuronserve.bucketing.pack import NO_DRAFT, StepPacker, unpack
from neuronserve.bucketing.row import Row, demand_of, int32
from neuronserve.bucketing.shape import StepDemand, holds
from neuronserve.neuron_worker.device.base import DeviceOutput, PackedBatch, PromptScores, StepShape, Want

BLOCK_SIZE = 4
PROMPTS = 3


def decode(token: int, position: int, blocks: list[int], **more: Any) -> Row:
    return Row(int32([token]), position, int32(blocks), is_decode=True, want=more.pop("want", Want.TOKEN), **more)


def prompt(tokens: list[int], position: int, blocks: list[int], **more: Any) -> Row:
    return Row(int32(tokens), position, int32(blocks), is_decode=False, want=more.pop("want", Want.NOTHING), **more)


def packed(rows: list[Row], shape: StepShape) -> PackedBatch:
    packer = StepPacker(BLOCK_SIZE, PROMPTS)
    packer.prepare(shape)
    return packer.pack(rows, shape)


def arrays(batch: PackedBatch) -> dict[str, list[Any]]:
    """Every array of a batch by name, copied."""
    found = {}
    for part in (batch.decode, batch.prefill, batch.sampling):
        for field in fields(part) if part is not None else ():
            found[f"{type(part).__name__}.{field.name}"] = getattr(part, field.name).tolist()
    return found


def naive(rows: list[Row], shape: StepShape) -> dict[str, list[Any]]:
    """The same batch, written out place by place from padding."""
    decodes = [row for row in rows if row.is_decode]
    prompts = [row for row in rows if not row.is_decode]
    num_prompts = PROMPTS if shape.prefill_tokens else 0
    num_blocks = -(-shape.context // BLOCK_SIZE)
    at: dict[str, list[Any]] = {}
    if shape.decode_rows:
        padding = [None] * (shape.decode_rows - len(decodes))
        at["DecodePart.tokens"] = [
            [int(row.tokens[i]) if row and i < row.length else 0 for i in range(shape.decode_width)]
            for row in [*decodes, *padding]
        ]
        at["DecodePart.positions"] = [row.position if row else 0 for row in [*decodes, *padding]]
        at["DecodePart.lengths"] = [row.length if row else 0 for row in [*decodes, *padding]]
        at["DecodePart.blocks"] = [block_row(row, num_blocks) for row in [*decodes, *padding]]
    if shape.prefill_tokens:
        padding = [None] * (num_prompts - len(prompts))
        tokens = [int(token) for row in prompts for token in row.tokens]
        targets = [
            int(target) for row in prompts for target in ([-1] * row.length if row.targets is None else row.targets)
        ]
        tail = shape.prefill_tokens - len(tokens)
        at["PrefillPart.tokens"] = tokens + [0] * tail
        at["PrefillPart.targets"] = targets + [-1] * tail
        at["PrefillPart.starts"] = [
            sum(row.length for row in prompts[:i]) if i < len(prompts) else 0 for i in range(num_prompts)
        ]
        at["PrefillPart.lengths"] = [row.length if row else 0 for row in [*prompts, *padding]]
        at["PrefillPart.positions"] = [row.position if row else 0 for row in [*prompts, *padding]]
        at["PrefillPart.blocks"] = [block_row(row, num_blocks) for row in [*prompts, *padding]]
    placed: list[Row | None] = [None] * (shape.decode_rows + num_prompts)
    placed[: len(decodes)] = decodes
    placed[shape.decode_rows : shape.decode_rows + len(prompts)] = prompts
    for name, default in (("want", 0), ("temperature", 0.0), ("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        at[f"RowSampling.{name}"] = [getattr(row, name) if row else default for row in placed]
    at["RowSampling.uniforms"] = [
        [row.uniforms[i] if row and i < len(row.uniforms) else 0.0 for i in range(shape.decode_width)] for row in placed
    ]
    return at


def block_row(row: Row | None, num_blocks: int) -> list[int]:
    blocks = [] if row is None else row.blocks.tolist()[:num_blocks]
    return blocks + [0] * (num_blocks - len(blocks))


# Numbers a float32 holds exactly, so that equality is equality.
shares = st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0])
SHAPES = (StepShape(3, 1, 0, 17), StepShape(2, 3, 0, 32), StepShape(0, 1, 12, 20), StepShape(3, 2, 10, 24))


@st.composite
def row_lists(draw: st.DrawFn, shape: StepShape) -> list[Row]:
    """Rows that `shape` holds, decodes and prompts in any order."""
    rows = []
    for _ in range(draw(st.integers(0, shape.decode_rows))):
        rows.append(draw(one_row(draw(st.integers(1, shape.decode_width)), shape.context, True)))
    left = shape.prefill_tokens
    for _ in range(draw(st.integers(0, PROMPTS))):
        if left:
            length = draw(st.integers(1, min(left, shape.context)))
            left -= length
            rows.append(draw(one_row(length, shape.context, False)))
    return draw(st.permutations(rows))


@st.composite
def one_row(draw: st.DrawFn, length: int, context: int, is_decode: bool) -> Row:
    position = draw(st.integers(0, context - length))
    spare = draw(st.integers(0, 2))  # blocks allocated ahead of need
    num_blocks = -(-(position + length) // BLOCK_SIZE) + spare
    ids = st.integers(1, 99)
    targets = None if is_decode else draw(st.none() | st.lists(ids, min_size=length, max_size=length).map(int32))
    draws = st.lists(shares, min_size=length if is_decode else 1, max_size=length if is_decode else 1).map(tuple)
    return Row(
        tokens=int32(draw(st.lists(ids, min_size=length, max_size=length))),
        position=position,
        blocks=int32(draw(st.lists(ids, min_size=num_blocks, max_size=num_blocks))),
        is_decode=is_decode,
        want=draw(st.sampled_from(Want)),
        temperature=draw(shares),
        top_k=draw(st.integers(0, 50)),
        top_p=draw(shares),
        min_p=draw(shares),
        uniforms=draw(st.just(()) | draws),
        targets=targets,
        prompt_logprobs=0 if is_decode else draw(st.integers(0, 5)),
    )


@given(st.data())
def test_steps_on_reused_buffers_equal_the_naive_packing(data: st.DataObject) -> None:
    packer = StepPacker(BLOCK_SIZE, PROMPTS)
    for shape in SHAPES:
        packer.prepare(shape)
    for _ in range(data.draw(st.integers(1, 6))):
        shape = data.draw(st.sampled_from(SHAPES))
        rows = data.draw(row_lists(shape))
        batch = packer.pack(rows, shape)
        assert arrays(batch) == naive(rows, shape)
        assert batch.shape == shape
        assert batch.prompt_logprobs == max((row.prompt_logprobs for row in rows), default=0)


def test_rows_that_stay_are_not_written_again_and_those_that_move_are() -> None:
    """A row's blocks and its sampling are as they were, in the place they were in, or written anew."""
    packer, shape = StepPacker(BLOCK_SIZE, PROMPTS), StepShape(3, 1, 0, 16)
    packer.prepare(shape)
    first, second = decode(1, 0, [1, 2, 3], temperature=0.5), decode(2, 9, [4, 5, 6, 7], top_k=7)
    longer = first._replace(position=8, blocks=int32([1, 2, 3, 9]))
    for rows in (
        [first, second],
        [first, second],
        [first],
        [first, second],
        [second, first],
        [longer, second],
        [],
        [longer],
    ):
        assert arrays(packer.pack(rows, shape)) == naive(rows, shape)

    batch = packer.pack([longer, second], shape)
    assert batch.decode is not None
    batch.decode.blocks[0, 0] = batch.sampling.top_k[1] = 77
    packer.pack([longer, second], shape)
    assert (batch.decode.blocks[0, 0], batch.sampling.top_k[1]) == (77, 77), "what stays was written again"


@given(st.data())
def test_unpack_gives_each_row_its_own(data: st.DataObject) -> None:
    """A device that answers each place with numbers made of the row's own tokens."""
    shape = data.draw(st.sampled_from(SHAPES))
    rows = data.draw(row_lists(shape))
    batch = packed(rows, shape)
    results = unpack(echo(batch), rows, shape)
    assert len(results) == len(rows)
    for row, result in zip(rows, results, strict=True):
        expected = row.tokens if row.is_decode else row.tokens[-1:]
        assert result.tokens == (expected + 1000).tolist()
        if row.want == Want.LOGITS:
            assert result.logits is not None
            assert result.logits.tolist() == [[token + 2000, row.position] for token in expected.tolist()]
        else:
            assert result.logits is None
        if row.targets is None:
            assert result.prompt_scores is None
        else:
            assert result.prompt_scores is not None
            assert result.prompt_scores.target_ranks.tolist() == row.targets.tolist()
            assert result.prompt_scores.top_ids[:, 0].tolist() == row.targets.tolist()


def echo(batch: PackedBatch) -> DeviceOutput:
    shape, want = batch.shape, batch.sampling.want
    num_rows, width = batch.sampling.uniforms.shape
    tokens = np.full((num_rows, width), -1, dtype=np.int32)
    logits = []
    for index in range(shape.decode_rows):
        assert batch.decode is not None
        for place in range(batch.decode.lengths[index]):
            tokens[index, place] = batch.decode.tokens[index, place] + 1000
            if want[index] == Want.LOGITS:
                logits.append([batch.decode.tokens[index, place] + 2000, batch.decode.positions[index]])
    scores = None
    if batch.prefill is not None:
        for index, (start, length) in enumerate(zip(batch.prefill.starts, batch.prefill.lengths, strict=True)):
            if length:
                last = batch.prefill.tokens[start + length - 1]
                tokens[shape.decode_rows + index, 0] = last + 1000
                if want[shape.decode_rows + index] == Want.LOGITS:
                    logits.append([last + 2000, batch.prefill.positions[index]])
        targets = batch.prefill.targets
        scores = PromptScores(
            targets.astype(np.float32), targets, targets[:, None], targets[:, None].astype(np.float32)
        )
    table = np.array(logits, dtype=np.float32).reshape(-1, 2)
    return DeviceOutput(tokens, table if len(table) else None, scores)


def test_an_unused_shape_is_all_padding() -> None:
    shape = StepShape(2, 1, 4, 8)
    assert arrays(StepPacker(BLOCK_SIZE, PROMPTS).prepare(shape)) == naive([], shape)


def test_buffers_are_made_once_and_arrays_stay_in_place() -> None:
    packer, shape = StepPacker(BLOCK_SIZE, PROMPTS), StepShape(2, 1, 8, 16)
    prepared = packer.prepare(shape)
    batch = packer.pack([decode(1, 0, [1])], shape)
    assert packer.prepare(shape).decode is prepared.decode is batch.decode
    assert prepared.prefill is batch.prefill
    assert prepared.sampling is batch.sampling


def test_a_part_that_the_shape_lacks_is_none() -> None:
    packer = StepPacker(BLOCK_SIZE, PROMPTS)
    decode_only, prefill_only = packer.prepare(StepShape(2, 1, 0, 8)), packer.prepare(StepShape(0, 1, 8, 8))
    assert decode_only.prefill is None
    assert len(decode_only.sampling.want) == 2
    assert prefill_only.decode is None
    assert len(prefill_only.sampling.want) == PROMPTS


def test_the_arrays_have_the_protocols_types() -> None:
    batch = packed([], StepShape(2, 2, 4, 8))
    assert batch.decode is not None
    assert batch.prefill is not None
    for part in (batch.decode, batch.prefill):
        assert {getattr(part, field.name).dtype for field in fields(part)} == {np.dtype(np.int32)}
    assert [getattr(batch.sampling, field.name).dtype.name for field in fields(batch.sampling)] == [
        "int32",
        "float32",
        "int32",
        "float32",
        "float32",
        "float64",
    ]


def test_packing_without_prepare_is_an_error() -> None:
    with pytest.raises(KeyError, match="prepare"):
        StepPacker(BLOCK_SIZE, PROMPTS).pack([], StepShape(1, 1, 0, 8))


@pytest.mark.parametrize(
    ("rows", "numbers"),
    [
        ([decode(1, 0, [1])] * 3, "3 decode rows.*holds 2"),
        ([decode(1, 0, [1])._replace(tokens=int32([1, 2]))], "2 tokens in a decode row.*holds 1"),
        ([prompt([1], 0, [1])] * 4, "4 prompts.*holds 3"),
        ([prompt([1, 2, 3], 0, [1]), prompt([1, 2], 0, [2])], "5 prompt tokens.*holds 4"),
        ([decode(1, 8, [1, 2, 3])], "9 positions.*holds 8"),
    ],
)
def test_rows_that_do_not_fit_are_refused_before_anything_is_written(rows: list[Row], numbers: str) -> None:
    shape = StepShape(2, 1, 4, 8)
    packer = StepPacker(BLOCK_SIZE, PROMPTS)
    before = arrays(packer.prepare(shape))
    with pytest.raises(DoesNotFit, match=numbers):
        packer.pack(rows, shape)
    assert arrays(packer.prepare(shape)) == before


@given(st.sampled_from(SHAPES).flatmap(lambda shape: st.tuples(st.just(shape), row_lists(shape))))
def test_a_shape_holds_the_demand_of_rows_made_for_it(case: tuple[StepShape, list[Row]]) -> None:
    shape, rows = case
    assert holds(shape, demand_of(rows))


def test_demand_counts_rows_widths_tokens_and_reach() -> None:
    rows = [decode(1, 9, [1, 2, 3]), decode(1, 4, [4, 5])._replace(tokens=int32([1, 2, 3])), prompt([1, 2], 3, [6, 7])]
    assert demand_of(rows) == StepDemand(decode_rows=2, decode_width=3, prefill_tokens=2, context=10)


def test_a_row_with_drafts_of_the_device_s_own_is_as_wide_as_it_may_grow() -> None:
    shape = StepShape(3, 4, 0, 16)
    rows = [decode(5, 4, [1], fused_drafts=3), decode(6, 9, [2], fused_drafts=1), decode(7, 2, [3])]
    assert demand_of(rows) == StepDemand(decode_rows=3, decode_width=4, prefill_tokens=0, context=11)
    assert rows[1].context == 11
    assert packed(rows, shape).decode.lengths.tolist() == [1, 1, 1]  # type: ignore[union-attr]

    given = np.array([[1, 2, 3, 4], [5, 6, 7, 8], [9, -1, -1, -1]], np.int32)
    assert [row.tokens for row in unpack(DeviceOutput(given), rows, shape)] == [[1, 2, 3, 4], [5, 6], [9]]


def test_a_draft_request_knows_what_stands_and_what_follows() -> None:
    shape = StepShape(3, 3, 8, 16)
    packer = StepPacker(BLOCK_SIZE, PROMPTS)
    packer.prepare(shape)
    rows = [decode(5, 4, [1, 2]), prompt([7, 8], 0, [3]), decode(6, 2, [4]), prompt([9], 4, [5, 6])]
    packer.pack(rows, shape)

    request = packer.pack_draft(rows, shape, [1, 2, 1, 1], [11, 12, NO_DRAFT, 13])
    assert request.lengths.tolist() == [1, 1, 0]
    assert request.newest.tolist() == [11, -1, -1, 12, 13, -1]  # three decode rows, then three prompts

    assert packer.pack_draft(rows[:1], shape, [1], [2]).newest.tolist() == [2, -1, -1, -1, -1, -1]
