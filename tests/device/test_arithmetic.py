"""The device whose answers can be worked out on paper: the arithmetic in sight, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuronserve.bucketing.pack import NO_DRAFT, RowOutput, StepPacker, places, unpack
from neuronserve.bucketing.row import Row, int32
from neuronserve.neuron_worker.device.arithmetic import SLOT_CAPABILITIES, ArithmeticDevice, answer, sample
from neuronserve.neuron_worker.device.base import DeviceOptions, StepShape, Want
from neuronserve.neuron_worker.device.errors import DeviceError, DoesNotFit, LoadError, UncompiledShape

VOCABULARY = 103  # answers are 3 + (weighted sum) mod 100
SHAPES = (StepShape(2, 1, 0, 16), StepShape(0, 1, 8, 16), StepShape(2, 1, 8, 16))
VERIFY = StepShape(2, 4, 0, 16)
LN2 = np.log(2)


class World:
    """A loaded device of eight blocks of four tokens, and its packer."""

    def __init__(
        self, directory: Path, device: ArithmeticDevice | None = None, block_size: int = 4, num_drafts: int = 0
    ) -> None:
        (directory / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
        self.device = device or ArithmeticDevice()
        options = DeviceOptions(
            max_num_seqs=2, max_model_len=16, block_size=block_size, prompts_per_call=2, num_drafts=num_drafts
        )
        self.facts = self.device.load(str(directory), options, str(directory) if num_drafts else None)
        self.device.allocate(8)
        self.packer = StepPacker(block_size, 2)
        for shape in (*SHAPES, VERIFY):
            self.device.compile(shape)
            self.packer.prepare(shape)
        self.device.seal()

    def run(self, shape: StepShape, *rows: Row) -> list[RowOutput]:
        return unpack(self.device.run(self.packer.pack(rows, shape)), rows, shape)

    def tokens(self, shape: StepShape, *rows: Row) -> list[int]:
        return [int(output.tokens[0]) for output in self.run(shape, *rows)]

    def draft(self, shape: StepShape, *rows: Row, standing: list[int], newest: list[int]) -> list[list[int]]:
        """Of a step that has been run."""
        batch = self.packer.pack(rows, shape)
        drafts = self.device.draft(batch, self.packer.pack_draft(rows, shape, standing, newest))
        return [drafts[place].tolist() for place in places(rows, shape)]


DECODE, PREFILL, MIXED = SHAPES


def prompt(tokens: list[int], blocks: list[int], position: int = 0, **more: Any) -> Row:
    return Row(int32(tokens), position, int32(blocks), is_decode=False, want=more.pop("want", Want.TOKEN), **more)


def decode(token: int, position: int, blocks: list[int], **more: Any) -> Row:
    return Row(int32([token]), position, int32(blocks), is_decode=True, want=more.pop("want", Want.TOKEN), **more)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_answers_by_hand(world: World) -> None:
    # 3 + (1*3 + 2*4) = 14; then 3 + (1*3 + 2*4 + 3*14) = 56.
    assert world.tokens(PREFILL, prompt([3, 4], [1])) == [14]
    assert world.tokens(DECODE, decode(14, 2, [1])) == [56]


def test_a_chunk_goes_on_where_the_last_one_ended(world: World) -> None:
    world.run(PREFILL, prompt([5, 6, 7, 8, 9], [3, 1], want=Want.NOTHING))

    # 5 + 12 + 21 + 32 + 45 + 60 = 175, so 3 + 75, through two blocks that are not in order.
    assert world.tokens(PREFILL, prompt([10], [3, 1], position=5)) == [78]


def test_two_prompts_and_a_decode_row_share_a_call(world: World) -> None:
    world.run(PREFILL, prompt([3, 4], [1]))

    tokens = world.tokens(MIXED, decode(14, 2, [1]), prompt([3, 4], [2]), prompt([50, 60, 70], [3]))

    assert tokens == [56, 14, 3 + (50 + 120 + 210) % 100]


def test_blocks_in_the_wrong_order_change_the_answer(world: World) -> None:
    world.run(PREFILL, prompt([5, 6, 7, 8, 9], [3, 1], want=Want.NOTHING))
    assert world.tokens(PREFILL, prompt([10], [1, 3], position=5)) != [78]


def test_a_copied_block_reads_like_its_source(world: World) -> None:
    world.run(PREFILL, prompt([3, 4], [1], want=Want.NOTHING))
    world.device.copy_blocks([(1, 5)])
    assert world.tokens(DECODE, decode(14, 2, [5])) == [56]


def test_each_token_is_half_as_likely_as_the_one_before(world: World) -> None:
    [output] = world.run(PREFILL, prompt([3, 4], [1], want=Want.LOGITS))

    assert output.logits is not None
    probs = np.exp(output.logits[0]) / np.exp(output.logits[0]).sum()
    assert probs.argmax() == 14
    assert probs[[14, 15, 16]] == pytest.approx([1 / 2, 1 / 4, 1 / 8])


@pytest.mark.parametrize(
    ("how", "uniform", "expected"),
    [
        # 14, 15, 16, ... with 1/2, 1/4, 1/8, ...; ids below 14 come around the end and weigh next to nothing.
        ({}, 0.49, 14),
        ({}, 0.51, 15),
        ({}, 0.80, 16),
        ({"temperature": 0.5}, 0.74, 14),  # 3/4, 3/16, ...
        ({"temperature": 0.5}, 0.76, 15),
        ({"top_k": 2}, 0.66, 14),  # 2/3, 1/3
        ({"top_k": 2}, 0.99, 15),
        ({"top_p": 0.75}, 0.99, 15),  # the two reach 0.75
        ({"top_p": 0.76}, 0.99, 16),
        ({"min_p": 0.24}, 0.99, 16),  # 16 is a quarter as likely as 14, 17 an eighth
        ({"min_p": 0.26}, 0.99, 15),
    ],
)
def test_draws_by_the_inverse_distribution(world: World, how: dict[str, Any], uniform: float, expected: int) -> None:
    row = prompt([3, 4], [1], uniforms=(uniform, uniform), **{"temperature": 1.0, **how})
    assert world.tokens(PREFILL, row) == [expected]


def test_equal_logits_rank_by_id() -> None:
    assert sample(np.zeros(4, dtype=np.float32), 1.0, top_k=2, top_p=1.0, min_p=0.0, uniform=0.99) == 1


def test_scores_of_a_prompt(world: World) -> None:
    # After 3 the answer is 3 + 3 = 6, and 4 is 101 steps further around the vocabulary.
    [output] = world.run(PREFILL, prompt([3, 4], [1], targets=int32([4, -1]), prompt_logprobs=2))

    scores = output.prompt_scores
    assert scores is not None
    assert scores.target_ranks.tolist() == [102, 0]
    assert scores.target_logprobs[0] == pytest.approx(-102 * LN2)
    assert scores.top_ids[0].tolist() == [6, 7]
    assert scores.top_logprobs[0] == pytest.approx([-LN2, -2 * LN2])


def test_refuses_a_shape_that_was_not_compiled(world: World) -> None:
    shape = StepShape(1, 1, 0, 16)
    world.packer.prepare(shape)
    with pytest.raises(UncompiledShape, match="was not compiled"):
        world.run(shape, decode(14, 2, [1]))


def test_refuses_to_compile_after_the_seal(world: World) -> None:
    with pytest.raises(UncompiledShape, match="sealed"):
        world.device.compile(StepShape(1, 1, 0, 16))


def test_refuses_a_real_token_in_the_scratch_block(world: World) -> None:
    with pytest.raises(DeviceError, match="scratch block"):
        world.run(PREFILL, prompt([3, 4], [0]))


def test_names_what_it_could_not_read(tmp_path: Path) -> None:
    options = DeviceOptions(max_num_seqs=1, max_model_len=16, block_size=4, prompts_per_call=1)
    with pytest.raises(LoadError, match=r"config\.json: no readable vocab_size"):
        ArithmeticDevice().load(str(tmp_path), options)


class TestDraft:
    """Three tokens ahead of [3, 4]: the device itself goes on with 14, 56, 80."""

    @pytest.fixture
    def world(self, tmp_path: Path) -> World:
        return World(tmp_path, num_drafts=3)

    def test_by_hand(self, world: World) -> None:
        assert world.facts.bytes_per_kv_token == 16
        world.run(PREFILL, prompt([3, 4], [1, 2]))
        # 3 + 8 + 42 = 53: the answer is 56, a multiple of 4, so the draft has 57. 53 + 4 * 57 = 281: 84, so 85.
        # 281 + 5 * 85 = 706: 9.
        drafts = world.draft(PREFILL, prompt([3, 4], [1, 2]), standing=[2], newest=[14])
        assert drafts == [[57, 85, 9]]

    def test_a_rejected_draft_leaves_no_trace(self, world: World) -> None:
        world.run(PREFILL, prompt([3, 4], [1, 2]))
        world.draft(PREFILL, prompt([3, 4], [1, 2]), standing=[2], newest=[14])
        row = Row(int32([14, 57, 85]), 2, int32([1, 2]), is_decode=True, want=Want.TOKEN)
        world.run(VERIFY, row)
        # Of 14, 57, 85 the first stands, 56 follows: 53 + 4 * 56 = 277: 80, so 81. 277 + 5 * 81 = 682: 85.
        assert world.draft(VERIFY, row, standing=[1], newest=[56])[0][:2] == [81, 85]

    def test_a_step_that_it_did_not_read_shows(self, world: World) -> None:
        world.run(PREFILL, prompt([3, 4], [1, 2]))
        world.run(DECODE, decode(14, 2, [1, 2]))
        [drafts] = world.draft(DECODE, decode(14, 2, [1, 2]), standing=[1], newest=[56])
        assert drafts[0] not in (80, 81)

    def test_reads_a_chunk_and_drafts_nothing(self, world: World) -> None:
        world.run(PREFILL, prompt([3], [1, 2], want=Want.NOTHING))
        assert world.draft(PREFILL, prompt([3], [1, 2]), standing=[1], newest=[NO_DRAFT]) == [[-1, -1, -1]]
        world.run(PREFILL, prompt([4], [1, 2], position=1))
        assert world.draft(PREFILL, prompt([4], [1, 2], position=1), standing=[1], newest=[14]) == [[57, 85, 9]]

    def test_a_copied_block_drafts_like_its_source(self, world: World) -> None:
        world.run(PREFILL, prompt([3], [1]))
        world.draft(PREFILL, prompt([3], [1]), standing=[1], newest=[NO_DRAFT])
        world.device.copy_blocks([(1, 5)])
        world.run(PREFILL, prompt([4], [5, 6], position=1))
        assert world.draft(PREFILL, prompt([4], [5, 6], position=1), standing=[1], newest=[14]) == [[57, 85, 9]]

    def test_beyond_the_rows_blocks_nothing_is_written(self, world: World) -> None:
        world.run(PREFILL, prompt([3, 4], [1, 2]), prompt([5, 6, 7, 8], [3]))
        rows = prompt([3, 4], [1, 2]), prompt([5, 6, 7, 8], [3])
        drafts = world.draft(PREFILL, *rows, standing=[2, 4], newest=[14, 9])
        assert drafts[0] == [57, 85, 9]
        assert all(0 <= token < VOCABULARY for token in drafts[1])

    def test_another_vocabulary_is_refused(self, tmp_path: Path) -> None:
        for name, size in (("target", 103), ("draft", 90)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "config.json").write_text(json.dumps({"vocab_size": size}))
        options = DeviceOptions(max_num_seqs=2, max_model_len=16, block_size=4, prompts_per_call=2, num_drafts=2)
        with pytest.raises(LoadError, match=r"vocabulary of 90, .* of 103"):
            ArithmeticDevice().load(str(tmp_path / "target"), options, str(tmp_path / "draft"))

    @pytest.mark.parametrize(
        ("standing", "newest", "text"),
        [([2], [5], "2 tokens stand, the step had 1"), ([1], [103], "newest token 103"), ([0], [5], "no token")],
    )
    def test_refuses_what_does_not_belong_to_the_step(
        self, world: World, standing: list[int], newest: list[int], text: str
    ) -> None:
        world.run(PREFILL, prompt([3, 4], [1]))
        world.run(DECODE, decode(14, 2, [1]))
        with pytest.raises(DoesNotFit, match=text):
            world.draft(DECODE, decode(14, 2, [1]), standing=standing, newest=newest)

    def test_refuses_without_a_draft(self, tmp_path: Path) -> None:
        world = World(tmp_path)
        world.run(PREFILL, prompt([3, 4], [1]))
        with pytest.raises(DeviceError, match="no draft is loaded"):
            world.draft(PREFILL, prompt([3, 4], [1]), standing=[2], newest=[14])


class TestSlots:
    """The same device as a chip of whole slots."""

    @pytest.fixture
    def world(self, tmp_path: Path) -> World:
        return World(tmp_path, ArithmeticDevice(SLOT_CAPABILITIES), block_size=16)

    def test_refuses_to_mix(self, world: World) -> None:
        world.run(PREFILL, prompt([3, 4], [1]))
        with pytest.raises(DeviceError, match="cannot mix"):
            world.run(MIXED, decode(14, 2, [1]), prompt([3], [2]))

    def test_refuses_a_prompt_in_chunks(self, world: World) -> None:
        with pytest.raises(DeviceError, match="cannot start a prompt at position 2"):
            world.run(PREFILL, prompt([3, 4], [1], position=2))

    def test_refuses_two_prompts_in_a_call(self, world: World) -> None:
        with pytest.raises(DeviceError, match="takes 1 prompts in a call, got 2"):
            world.run(PREFILL, prompt([3], [1]), prompt([4], [2]))

    def test_loses_a_live_row_that_a_decode_leaves_out(self, world: World) -> None:
        world.run(PREFILL, prompt([3, 4], [1]))
        world.run(PREFILL, prompt([50, 60], [2]))
        world.run(DECODE, decode(14, 2, [1]))

        assert world.tokens(DECODE, decode(73, 2, [2])) != [answer([50, 60, 73], VOCABULARY)]
