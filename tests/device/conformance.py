"""What every device must do, whatever it computes and wherever it runs.

A test class inherits `DeviceConformance` and gives a `place` fixture: how to make the device, and a model directory for
it. Nothing here knows what a model answers: a device is held against itself, alone against together, whole against
in pieces. What its capabilities say it cannot do is skipped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from neuronserve.neuron_worker.checks import joined_late
from neuronserve.neuron_worker.config import ServeRequest
from neuronserve.neuron_worker.device.base import Capabilities, Device, DeviceOptions, StepShape, Want
from neuronserve.neuron_worker.device.errors import DeviceError, LoadError, UncompiledShape
from neuronserve.neuron_worker.machine import Machine
from neuronserve.neuron_worker.resolve import resolve
from neuronserve.neuron_worker.verify import GROUPS, run_groups

from .driver import Driver, Sampling, StepRow, Stream, decode, prefill

LONGEST = 96  # positions of every model here
BLOCKS = 8
NUM_DRAFTS = 3
PROMPTS = ([5, 9, 2, 41, 7, 7, 30, 12, 4, 88, 15], [3, 4, 60, 22, 9, 1, 1], [77, 6, 19, 50, 2, 8, 33, 90, 11])


@dataclass(frozen=True)
class Place:
    make: Callable[[], Device]
    model_dir: str
    draft_dir: str | None = None  # None: the device loads none
    drafts_itself: bool = False  # the draft is the model


class Bench:
    """Makes devices for one test and closes them after it."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._made: list[Device] = []

    def bare(self) -> Device:
        """Nothing loaded."""
        device = self.place.make()
        self._made.append(device)
        return device

    def options(self, capabilities: Capabilities) -> DeviceOptions:
        block_size = LONGEST if capabilities.kv_layout == "slots" else 8
        return DeviceOptions(
            max_num_seqs=4, max_model_len=LONGEST, block_size=block_size, prompts_per_call=4, threads=1
        )

    def loaded(self) -> Device:
        device = self.bare()
        device.load(self.place.model_dir, self.options(device.capabilities))
        return device

    def driver(self, num_streams: int = 12, num_drafts: int = 0) -> Driver:
        device = self.bare()
        options = replace(self.options(device.capabilities), num_drafts=num_drafts)
        device.load(self.place.model_dir, options, self.place.draft_dir if num_drafts else None)
        num_blocks = 1 + num_streams * LONGEST // options.block_size
        return Driver(
            device,
            block_size=options.block_size,
            num_blocks=num_blocks,
            max_model_len=LONGEST,
            num_drafts=num_drafts,
        )

    def drafting(self) -> Driver:
        if self.place.draft_dir is None:
            pytest.skip("loads no draft")
        return self.driver(num_drafts=NUM_DRAFTS)

    def close(self) -> None:
        for device in self._made:
            device.close()


def capabilities_of(place: Place) -> Capabilities:
    device = place.make()
    device.close()
    return device.capabilities


@pytest.fixture
def bench(place: Place) -> Iterator[Bench]:
    bench = Bench(place)
    yield bench
    bench.close()


def read_prompt(driver: Driver, stream: Stream, **how: object) -> None:
    """The whole prompt in one call, its next token appended."""
    count = len(stream.tokens) - stream.computed
    [result] = driver.step([prefill(stream, count, want=Want.TOKEN, **how)])
    stream.tokens.append(int(result.tokens[0]))


def advance(driver: Driver, streams: list[Stream], num_steps: int = 1) -> None:
    for _ in range(num_steps):
        results = driver.step([decode(stream, want=Want.TOKEN) for stream in streams])
        for stream, result in zip(streams, results, strict=True):
            stream.tokens.append(int(result.tokens[0]))


def alone(driver: Driver, prompt: list[int], count: int) -> list[int]:
    """Prompt and `count` tokens more, with nobody beside it."""
    stream = Stream(list(prompt))
    read_prompt(driver, stream)
    advance(driver, [stream], count - 1)
    return stream.tokens


class DeviceConformance:
    # -- what it says of itself

    def test_capabilities_and_facts_are_plain_data(self, bench: Bench) -> None:
        device = bench.bare()
        facts = device.load(bench.place.model_dir, bench.options(device.capabilities))
        json.dumps([asdict(device.capabilities), asdict(facts)])
        assert set(device.capabilities.outputs) <= {"logits", "tokens"}
        assert min(facts.vocab_size, facts.num_layers, facts.bytes_per_kv_token) > 0

    # -- the order of the verbs

    def test_a_missing_directory_is_a_load_error_that_names_it(self, bench: Bench, tmp_path: Path) -> None:
        device = bench.bare()
        with pytest.raises(LoadError, match="no-model-here"):
            device.load(str(tmp_path / "no-model-here"), bench.options(device.capabilities))

    def test_nothing_works_before_load(self, bench: Bench) -> None:
        device = bench.bare()
        with pytest.raises(DeviceError):
            device.allocate(4)
        with pytest.raises(DeviceError):
            device.compile(StepShape(1, 1, 0, LONGEST))

    def test_a_step_before_the_cache_is_an_error(self, bench: Bench) -> None:
        other = bench.driver()
        row = prefill(Stream(list(PROMPTS[0]), blocks=[1, 2]), len(PROMPTS[0]))
        shape = other.padded_shape([row])
        device = bench.loaded()

        def compile_and_run() -> None:
            device.compile(shape)  # some need the cache here already
            device.run(other.pack([row], shape))

        with pytest.raises(DeviceError):
            compile_and_run()

    def test_compiling_after_the_seal_is_refused(self, bench: Bench) -> None:
        device = bench.loaded()
        device.allocate(13)
        device.seal()
        with pytest.raises(UncompiledShape):
            device.compile(StepShape(1, 1, 0, LONGEST))

    def test_an_unknown_shape_is_refused_and_the_device_serves_on(self, bench: Bench) -> None:
        driver = bench.driver()
        expected = alone(driver, PROMPTS[0], 3)
        stream = Stream(list(PROMPTS[0]))
        read_prompt(driver, stream)
        advance(driver, [stream])
        driver.device.seal()
        rows = [decode(stream, want=Want.TOKEN)]
        with pytest.raises(UncompiledShape):
            driver.device.run(driver.pack(rows, StepShape(4, 1, 0, LONGEST)))
        advance(driver, [stream])
        assert stream.tokens == expected

    def test_a_shape_may_be_compiled_twice(self, bench: Bench) -> None:
        driver = bench.driver()
        expected = alone(driver, PROMPTS[0], 3)
        driver.device.compile(StepShape(2, 1, 0, LONGEST))
        driver.device.compile(StepShape(2, 1, 0, LONGEST))
        assert alone(driver, PROMPTS[0], 3) == expected

    def test_close_may_come_twice_and_ends_everything(self, bench: Bench) -> None:
        driver = bench.driver()
        rows = [prefill(Stream(list(PROMPTS[0]), blocks=[1, 2]), 5)]
        shape = driver.padded_shape(rows)
        driver.compile(shape)
        driver.device.close()
        driver.device.close()
        with pytest.raises(DeviceError):
            driver.device.run(driver.pack(rows, shape))

    # -- rows do not depend on each other

    def test_alone_and_joined_late_give_the_same_tokens(self, bench: Bench) -> None:
        driver = bench.driver()
        expected = [alone(driver, prompt, 6) for prompt in PROMPTS]
        streams: list[Stream] = []
        for prompt in PROMPTS:
            streams.append(Stream(list(prompt)))
            read_prompt(driver, streams[-1])
            advance(driver, streams)
        advance(driver, streams, 4)
        for stream, tokens in zip(streams, expected, strict=True):
            assert stream.tokens[: len(tokens)] == tokens

    def test_padding_touches_nobody(self, bench: Bench) -> None:
        driver = bench.driver()
        expected = [alone(driver, prompt, 5) for prompt in PROMPTS[:2]]
        streams = [Stream(list(prompt)) for prompt in PROMPTS[:2]]
        for stream in streams:
            read_prompt(driver, stream)
        for _ in range(4):
            rows = [decode(stream, want=Want.TOKEN) for stream in streams]
            results = driver.step(rows, StepShape(4, 1, 0, LONGEST))
            for stream, result in zip(streams, results, strict=True):
                stream.tokens.append(int(result.tokens[0]))
        assert [stream.tokens for stream in streams] == expected

    def test_a_mixed_step_gives_the_tokens_of_two_steps(self, bench: Bench) -> None:
        driver = bench.driver()
        if not driver.device.capabilities.mixes_prefill_and_decode:
            pytest.skip("does not mix")
        expected = [alone(driver, prompt, 4) for prompt in PROMPTS[:2]]
        first, second = (Stream(list(prompt)) for prompt in PROMPTS[:2])
        read_prompt(driver, first)
        rows = [decode(first, want=Want.TOKEN), prefill(second, len(second.tokens), want=Want.TOKEN)]
        for stream, result in zip((first, second), driver.step(rows), strict=True):
            stream.tokens.append(int(result.tokens[0]))
        advance(driver, [first, second], 2)
        assert first.tokens == expected[0]
        assert second.tokens == expected[1][: len(second.tokens)]

    def test_several_prompts_in_one_call(self, bench: Bench) -> None:
        driver = bench.driver()
        if driver.device.capabilities.prompts_per_prefill == 1:
            pytest.skip("one prompt in a call")
        expected = [alone(driver, prompt, 3) for prompt in PROMPTS]
        streams = [Stream(list(prompt)) for prompt in PROMPTS]
        results = driver.step([prefill(stream, len(stream.tokens), want=Want.TOKEN) for stream in streams])
        for stream, result in zip(streams, results, strict=True):
            stream.tokens.append(int(result.tokens[0]))
        advance(driver, streams, 2)
        assert [stream.tokens for stream in streams] == expected

    def test_a_prompt_in_chunks_gives_the_tokens_of_the_whole(self, bench: Bench) -> None:
        driver = bench.driver()
        if not driver.device.capabilities.splits_prompts:
            pytest.skip("does not split prompts")
        expected = alone(driver, PROMPTS[0], 4)
        stream = Stream(list(PROMPTS[0]))
        for count in (3, 1, 5):
            driver.step([prefill(stream, count, want=Want.NOTHING)])
        read_prompt(driver, stream)
        advance(driver, [stream], 3)
        assert stream.tokens == expected

    def test_reading_a_token_at_a_time_gives_the_logits_of_the_prompt(self, bench: Bench) -> None:
        driver = bench.driver()
        whole, slow = Stream(list(PROMPTS[0])), Stream(list(PROMPTS[0]))
        [expected] = driver.step([prefill(whole, len(whole.tokens))])
        driver.step([prefill(slow, 1)])
        rest = len(slow.tokens) - 1
        # A device that needs every live row in each decode would lose `whole`, which is done.
        logits = [driver.step([decode(slow)])[0].logits for _ in range(rest)]
        np.testing.assert_allclose(logits[-1], expected.logits, atol=1e-4, rtol=0)

    # -- what a row asks for

    def test_each_row_gets_what_it_wants(self, bench: Bench) -> None:
        driver = bench.driver()
        wants = (Want.LOGITS, Want.NOTHING, Want.TOKEN)
        streams = [Stream(list(prompt)) for prompt in PROMPTS]
        for stream in streams:
            read_prompt(driver, stream)
        rows = [decode(stream, want=want) for stream, want in zip(streams, wants, strict=True)]
        shape = driver.padded_shape(rows)
        driver.compile(shape)
        output = driver.device.run(driver.pack(rows, shape))
        assert output.tokens.shape == (4, 1)
        assert output.tokens[[0, 1, 3], 0].tolist() == [-1, -1, -1]
        assert output.tokens[2, 0] >= 0
        assert output.logits is not None
        assert output.logits.shape[0] == 1
        assert output.logits.dtype == np.float32

    def test_no_logits_where_none_were_wanted(self, bench: Bench) -> None:
        driver = bench.driver()
        stream = Stream(list(PROMPTS[0]))
        rows = [prefill(stream, len(stream.tokens), want=Want.TOKEN)]
        driver.give_blocks(stream, len(stream.tokens))
        shape = driver.padded_shape(rows)
        driver.compile(shape)
        output = driver.device.run(driver.pack(rows, shape))
        assert output.logits is None
        assert output.prompt_scores is None

    def test_the_greedy_token_is_the_likeliest(self, bench: Bench) -> None:
        driver = bench.driver()
        tokens = alone(driver, PROMPTS[0], 2)
        stream = Stream(list(PROMPTS[0]))
        [result] = driver.step([prefill(stream, len(stream.tokens))])
        assert result.logits is not None
        assert int(result.logits[-1].argmax()) == tokens[len(PROMPTS[0])]

    def test_logits_of_a_row_that_verifies_come_one_per_token(self, bench: Bench) -> None:
        driver = bench.driver()
        if not driver.device.capabilities.splits_prompts:
            pytest.skip("no rows of several tokens")
        tokens = alone(driver, PROMPTS[0], 4)
        stream = Stream(list(tokens))
        driver.step([prefill(stream, len(PROMPTS[0]), want=Want.NOTHING)])
        [result] = driver.step([decode(stream, 3)])
        assert result.logits is not None
        assert result.logits.argmax(axis=1).tolist() == tokens[-3:]

    # -- what a user runs

    def test_the_checks_of_verify(self, place: Place) -> None:
        """The same text as `neuronserve verify` runs, so that the two cannot tell different stories."""
        capabilities = capabilities_of(place)
        request = ServeRequest(
            place.model_dir, max_model_len=LONGEST, max_num_seqs=4, options={"backend": capabilities.name}
        )
        config = resolve(request, {}, Machine()).config
        lines = list(run_groups(config, place.model_dir, place.make, GROUPS))
        assert not [line for line in lines if line.failed]
        assert "pass" in [line.result for line in lines if line.what == joined_late.__doc__]

    # -- sampling

    def drawn(self, driver: Driver, sampling: Sampling) -> int:
        if driver.device.capabilities.sampling != "per_step":
            pytest.skip("sampling is fixed at load")
        stream = Stream(list(PROMPTS[0]))
        [result] = driver.step([prefill(stream, len(stream.tokens), want=Want.TOKEN, sampling=sampling)])
        return int(result.tokens[0])

    def test_the_same_number_draws_the_same_token(self, bench: Bench) -> None:
        driver = bench.driver()
        for number in (0.0, 0.37, 0.999):
            sampling = Sampling(temperature=1.5, uniforms=(number,))
            assert self.drawn(driver, sampling) == self.drawn(driver, sampling)

    def test_numbers_far_apart_draw_different_tokens(self, bench: Bench) -> None:
        driver = bench.driver()
        low, high = (self.drawn(driver, Sampling(temperature=50.0, uniforms=(u,))) for u in (0.01, 0.99))
        assert low < high  # ids are laid end to end

    def test_the_likeliest_of_one_is_greedy(self, bench: Bench) -> None:
        driver = bench.driver()
        greedy = self.drawn(driver, Sampling())
        assert self.drawn(driver, Sampling(temperature=5.0, top_k=1, uniforms=(0.8,))) == greedy
        assert self.drawn(driver, Sampling(temperature=5.0, min_p=1.0, uniforms=(0.8,))) == greedy

    # -- scores of a prompt

    def test_prompt_scores_are_those_of_the_logits(self, bench: Bench) -> None:
        driver = bench.driver()
        if not driver.device.capabilities.prompt_logprobs:
            pytest.skip("no prompt log-probabilities")
        tokens = list(PROMPTS[0])
        scored, slow = Stream(list(tokens)), Stream(list(tokens))
        [result] = driver.step([prefill(scored, len(tokens), scored=True)], prompt_logprobs=3)
        driver.step([prefill(slow, 1)])
        for position in range(1, len(tokens) - 1):
            [step] = driver.step([decode(slow)])
            assert step.logits is not None
            self.check_score(step.logits[0], tokens[position + 1], result, position)

    def check_score(self, logits: np.ndarray, target: int, result: object, position: int) -> None:
        shifted = logits.astype(np.float64) - logits.max()
        logprobs = shifted - np.log(np.exp(shifted).sum())
        scores = {name: getattr(result, name)[position] for name in ("target_logprobs", "target_ranks")}
        np.testing.assert_allclose(scores["target_logprobs"], logprobs[target], atol=1e-3)
        assert scores["target_ranks"] == (logits >= logits[target]).sum()
        best = np.argsort(-logits, kind="stable")[:3]
        assert result.top_ids[position].tolist() == best.tolist()  # type: ignore[attr-defined]
        np.testing.assert_allclose(result.top_logprobs[position], logprobs[best], atol=1e-3)  # type: ignore[attr-defined]

    # -- memory

    def test_copied_blocks_continue_as_the_original(self, bench: Bench) -> None:
        driver = bench.driver()
        if driver.device.capabilities.kv_layout != "blocks":
            pytest.skip("whole slots")
        expected = alone(driver, PROMPTS[0], 4)
        original, copy = Stream(list(PROMPTS[0])), Stream(list(PROMPTS[0]))
        read_prompt(driver, original)
        driver.give_blocks(copy, len(original.tokens))
        driver.device.copy_blocks(list(zip(original.blocks, copy.blocks, strict=True)))
        copy.tokens, copy.computed = list(original.tokens), original.computed
        advance(driver, [original], 3)
        advance(driver, [copy], 3)
        assert original.tokens == copy.tokens == expected

    def test_an_output_does_not_follow_the_callers_arrays(self, bench: Bench) -> None:
        driver = bench.driver()
        stream = Stream(list(PROMPTS[0]))
        driver.give_blocks(stream, len(stream.tokens))
        rows: list[StepRow] = [prefill(stream, len(stream.tokens))]
        shape = driver.padded_shape(rows)
        driver.compile(shape)
        batch = driver.pack(rows, shape)
        output = driver.device.run(batch)
        assert output.logits is not None
        before = output.logits.copy()
        assert batch.prefill is not None
        for array in (batch.prefill.tokens, batch.prefill.blocks, batch.sampling.want):
            array.fill(7)
        np.testing.assert_array_equal(output.logits, before)

    def test_a_draft_where_none_was_loaded_is_refused(self, bench: Bench) -> None:
        driver = bench.driver()
        read_prompt(driver, Stream(list(PROMPTS[0])))
        with pytest.raises(DeviceError, match="no draft is loaded"):
            driver.draft([5])
