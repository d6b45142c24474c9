"""One test for each trap of the library, through our backend. `test_fake` shows that each of them bites."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from neuronserve.neuron_worker.device.errors import DeviceError, DoesNotFit

from .server import LONGEST, VOCABULARY, Running, Server

Serve = Callable[..., Server]


def test_one_token_prompts_routed_to_decode(serve: Serve, chip: Any, answers: Any) -> None:
    server = serve()
    neighbour = server.start([5, 6, 7])
    single = server.start([9])
    for _ in range(5):
        server.decode()
    assert neighbour.tokens == answers.greedy([5, 6, 7], 6, VOCABULARY)
    assert single.tokens == answers.greedy([9], 6, VOCABULARY)
    assert [launch.kind for launch in chip.chips[0].launches[:2]] == ["prefill", "prefill"]


def test_slot_0_overwritten_by_idle_rows(serve: Serve, answers: Any) -> None:
    """A sequence that was left out of a decode is refused, not continued from a damaged cache."""
    server = serve()
    first, second = server.start([5, 6, 7]), server.start([8, 9])
    assert first.slot == 0
    server.decode([second])
    with pytest.raises(DeviceError, match=r"slot 0 was left out of an earlier decode.*read again"):
        server.decode([first, second])


def test_a_sequence_that_was_left_out_can_be_read_again(serve: Serve, answers: Any) -> None:
    server = serve()
    first, second = server.start([5, 6, 7]), server.start([8, 9])
    server.decode([second])
    again = Running([5, 6, 7], first.slot)
    server.call([server.row(again, again.prompt, 0, is_decode=False)], [again])
    server.decode([again, second])
    assert again.tokens == answers.greedy([5, 6, 7], 2, VOCABULARY)


def test_idle_slots_do_not_matter_once_their_sequence_is_over(serve: Serve, answers: Any) -> None:
    server = serve()
    stays, leaves = server.start([5, 6, 7]), server.start([8, 9])
    server.decode()
    server.end(leaves)
    server.decode()
    joins = server.start([3, 3, 3])
    server.decode()
    assert stays.tokens == answers.greedy([5, 6, 7], 4, VOCABULARY)
    assert joins.tokens == answers.greedy([3, 3, 3], 2, VOCABULARY)


def test_mutated_neuron_config(serve: Serve, model_dir: Callable[..., str], answers: Any) -> None:
    """Parameters written while serving come from numbers of our own, and two models share no configuration."""
    directory = model_dir()
    for _ in range(2):
        server = serve(directory, sampling="device")
        assert server.generate([5, 6, 7], 3) == answers.greedy([5, 6, 7], 3, VOCABULARY)
        assert server.generate([5, 6], 3, temperature=0.5, top_k=1) == answers.greedy([5, 6], 3, VOCABULARY)


def test_pad_token_id_0(serve: Serve, model_dir: Callable[..., str], answers: Any) -> None:
    """Token 0 is a token like any other, in a draft's reply too."""
    prompt = next([n, 5] for n in range(1, VOCABULARY) if 0 in answers.greedy([n, 5], 6, VOCABULARY)[1:])
    server = serve(draft=model_dir("draft"), num_drafts=3, sampling="device")
    neighbour = server.start([7, 8])
    found = server.generate(prompt, 6)
    assert 0 in found
    assert found == answers.greedy(prompt, 6, VOCABULARY)
    assert neighbour.tokens == answers.greedy([7, 8], len(neighbour.tokens), VOCABULARY)


def test_positions_mutated_in_place(serve: Serve, model_dir: Callable[..., str], answers: Any) -> None:
    """The caller's arrays are as they were, although an EAGLE step writes to the positions it is given."""
    server = serve(draft=model_dir("draft", is_eagle=True), num_drafts=2, sampling="device")
    request = server.start([5, 6, 7])
    batch = server.packed([server.row(request, request.all[-1:], 3, is_decode=True)])
    assert batch.decode is not None
    before = batch.decode.positions.copy()
    server.device.run(batch)
    np.testing.assert_array_equal(batch.decode.positions, before)


def test_default_largest_prompt_is_half_of_n_positions(serve: Serve, chip: Any, answers: Any) -> None:
    """Our largest prompt is the plan's, here as long as the cache."""
    server = serve(context_buckets=None)
    prompt = [n % 60 + 3 for n in range(LONGEST - 1)]
    assert server.generate(prompt, 1) == answers.greedy(prompt, 1, VOCABULARY)
    assert chip.chips[0].model.context_buckets[-1] == LONGEST


def test_bare_stop_iteration_past_the_last_bucket(serve: Serve, answers: Any) -> None:
    server = serve(max_model_len=16, context_buckets=(8, 16), token_generation_buckets=(16,))
    request = server.start(list(range(3, 18)))  # 15 tokens: positions 0 to 14
    server.decode()  # position 15, the last
    assert request.tokens == answers.greedy(request.prompt, 2, VOCABULARY)
    batch = server.packed([server.row(request, [3], 15, is_decode=True)])
    assert batch.decode is not None
    batch.decode.positions[0] = 16
    with pytest.raises(DoesNotFit, match=r"position 16 is past the last one, 15"):
        server.device.run(batch)


def test_a_prompt_past_the_last_bucket(serve: Serve) -> None:
    server = serve(context_buckets=(8, 16))
    batch = server.packed([server.prompt_row([3] * 16, 0)])
    assert batch.prefill is not None
    longer = replace(batch.prefill, tokens=np.full(17, 3, np.int32), lengths=np.array([17, 0, 0], np.int32))
    with pytest.raises(DoesNotFit, match=r"17 tokens, the largest compiled context bucket is 16"):
        server.device.run(replace(batch, prefill=longer))


def test_temperature_0(serve: Serve, chip: Any, answers: Any) -> None:
    server = serve(sampling="device")
    assert server.generate([5, 6, 7], 8, temperature=0.0) == answers.greedy([5, 6, 7], 8, VOCABULARY)
    assert chip.chips[0].divisions_by_zero == 0


def test_no_speculation_past_the_last_bucket(serve: Serve, model_dir: Callable[..., str], chip: Any) -> None:
    """Up to the last position every row drafts, and no write falls outside the cache."""
    server = serve(draft=model_dir("draft"), num_drafts=4, sampling="device", token_generation_buckets=(LONGEST,))
    request = server.start([3] * 30)
    while len(request.all) <= LONGEST:
        server.decode()
    assert [each.lost_writes for each in chip.chips] == [[], []]
    assert max(launch.bucket for each in chip.chips for launch in each.launches) == LONGEST + 5


def test_thread_safety(serve: Serve, chip: Any) -> None:
    """Two threads at once are one after the other: the library would mix their inputs."""
    server = serve()
    batches = [server.packed([server.prompt_row([4, 5], slot)]) for slot in (0, 1)]
    chip.seconds_per_launch = 0.01
    with ThreadPoolExecutor(2) as pool:
        outputs = list(pool.map(server.device.run, batches))
    assert outputs[0].tokens.tolist() == outputs[1].tokens.tolist()
    assert len(chip.chips[0].launches) == 2


def test_ends_of_buckets_overwritten_by_cores_that_share_a_sequence(
    serve: Serve, model_dir: Callable[..., str], chip: Any, answers: Any
) -> None:
    """One bucket for all, which the library makes 128 positions longer than it is told."""
    server = serve(model_dir(num_key_value_heads=1), neuron_config={"shard_over_sequence": True})
    assert chip.chips[0].model.token_buckets == [LONGEST + 128]
    assert server.generate([5, 6, 7], LONGEST - 3) == answers.greedy([5, 6, 7], LONGEST - 3, VOCABULARY)
    assert (chip.chips[0].lost_writes, chip.chips[0].stale_reads) == ([], [])
    assert any("shard_over_sequence" in note for note in server.facts.notes)
