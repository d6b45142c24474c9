"""What adaptive depth learns from the steps of requests, and from drafts that nobody took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from neuronserve.neuron_worker.pace import Pace
from neuronserve.speculative.proposer import ASK_DEVICE, Proposal


def request(name: str, proposed: Proposal, **sampling: Any) -> Any:
    return SimpleNamespace(id=name, params=SamplingParams(**sampling), proposed=proposed, output=[])


def step(
    requests: list[Any], drafts: list[list[int]], tokens: list[list[int]], prefill: int = 0
) -> tuple[Any, dict[str, int]]:
    """A call and what each request got in it."""
    for one, own in zip(requests, tokens, strict=True):
        one.output += own
    owners = [SimpleNamespace(request=one, drafts=own) for one, own in zip(requests, drafts, strict=True)]
    batch = SimpleNamespace(shape=SimpleNamespace(prefill_tokens=prefill))
    sizes = {one.id: len(own) for one, own in zip(requests, tokens, strict=True)}
    return SimpleNamespace(owners=owners, batch=batch, seconds=1.0), sizes


@pytest.fixture
def pace() -> Pace:
    return Pace(lambda count: 32)


def chance(pace: Pace, source: int) -> float:
    return pace._depth.chances.expected(source, 1)[0]


@pytest.mark.parametrize(("said", "is_right"), [(5, True), (6, False)])
def test_what_was_looked_up_and_not_taken_is_learned_from(pace: Pace, said: int, is_right: bool) -> None:
    before = chance(pace, 2)
    pace.saw(*step([request("a", Proposal([said, 7], source=2))], [[]], [[5]]))
    assert (chance(pace, 2) > before) == is_right


@pytest.mark.parametrize(("kept", "is_right"), [(0, False), (1, True)])
def test_what_was_verified_is_learned_from(pace: Pace, kept: int, is_right: bool) -> None:
    before = chance(pace, 0)
    pace.saw(*step([request("a", Proposal([5, 6]))], [[5, 6]], [[5, 9][: 1 + kept]]))
    assert (chance(pace, 0) > before) == is_right


def test_what_the_device_was_not_asked_for_says_nothing(pace: Pace) -> None:
    before = chance(pace, 0)
    pace.saw(*step([request("a", ASK_DEVICE)], [[]], [[5]]))
    assert chance(pace, 0) == before


def test_a_proposal_is_learned_from_once(pace: Pace) -> None:
    one = request("a", Proposal([5], source=2))
    pace.saw(*step([one], [[]], [[5]]))
    between = chance(pace, 2)
    pace.saw(*step([one], [[]], [[5]]))
    assert chance(pace, 2) == between


def test_a_chunk_says_nothing_of_what_decoding_costs(pace: Pace) -> None:
    pace.saw(*step([request("a", Proposal())], [[]], [[5]], prefill=32))
    assert not pace._depth._costs


@pytest.mark.parametrize(("count", "rows"), [(1, 1), (16, 16), (17, 32)])
def test_small_batches_have_costs_of_their_own(pace: Pace, count: int, rows: int) -> None:
    requests = [request(str(index), Proposal()) for index in range(count)]
    pace.saw(*step(requests, [[]] * count, [[5]] * count))
    assert list(pace._depth._costs) == [rows]


FORCED: list[tuple[dict[str, Any], bool]] = [
    ({"seed": 3, "temperature": 0.5}, True),
    ({"seed": 3, "temperature": 0.0}, False),  # draws nothing
    ({"temperature": 0.5}, False),
    ({"seed": 3, "temperature": 0.5, "extra_args": {"tgi": {}, "tgi_drawn_seed": True}}, False),
]


@pytest.mark.parametrize(("sampling", "is_forced"), FORCED)
def test_who_asked_for_a_seed_is_drafted_for(pace: Pace, sampling: dict[str, Any], is_forced: bool) -> None:
    """Before anything is known nobody else is."""
    counts = pace.choose([request("a", ASK_DEVICE, **sampling)], {"a": 4})
    assert counts == ({"a": 4} if is_forced else {})


def test_before_a_step_is_over_the_device_is_asked_as_the_step_before_asked_it(pace: Pace) -> None:
    seeded, other = request("a", ASK_DEVICE, seed=3, temperature=0.5), request("b", ASK_DEVICE)
    assert pace.may_ask(other)  # nothing was chosen yet
    pace.choose([other], {"b": 4})  # plainly, to learn what that takes
    assert not pace.may_ask(other)
    assert pace.may_ask(seeded)  # its drafts are to depend on nothing but itself
    pace.choose([seeded], {"a": 4})
    assert pace.may_ask(other)
    pace.choose([request("c", Proposal([5], source=2), seed=3, temperature=0.5)], {"c": 1})  # of what was looked up
    assert not pace.may_ask(other)
