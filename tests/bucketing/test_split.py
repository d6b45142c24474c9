"""A step in calls: every row exactly once, each call within a shape, and no more calls than the device needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuronserve.bucketing.plan import Plan, PlanRequest, make_plan
from neuronserve.bucketing.row import Row, demand_of, int32
from neuronserve.bucketing.split import Part
from neuronserve.bucketing.split import split as split_parts
from neuronserve.neuron_worker.device.base import Capabilities, Want

from .devices import ALL, BLOCK_CHIP, CHUNKING_CHIP, CPU, SLOT_CHIP


def plan_for(device: Capabilities, prompts_per_call: int | None = None) -> Plan:
    limited = replace(device, prompts_per_prefill=prompts_per_call or device.prompts_per_prefill)
    return make_plan(PlanRequest(4, 512, 32, chunk_tokens=64), limited)


def split(rows: Sequence[Row], plan: Plan) -> list[Sequence[Row]]:
    """The calls' rows; what each is said to need is what it needs."""
    parts = split_parts(Part.of(rows), plan)
    assert [part.demand for part in parts] == [demand_of(part.rows) for part in parts]
    return [part.rows for part in parts]


def row(length: int, position: int = 0, is_decode: bool = False) -> Row:
    return Row(int32([1] * length), position, int32([1]), is_decode, Want.TOKEN)


D = row(1, 9, is_decode=True)


@pytest.mark.parametrize(
    ("device", "lengths", "calls"),
    [
        # (decode rows, prompt lengths) in, one such pair for each call out
        (CPU, (2, [30, 34]), [(2, [30, 34])]),
        (CPU, (2, [40, 40]), [(2, [40]), (0, [40])]),
        (CPU, (0, [40, 40, 20]), [(0, [40]), (0, [40, 20])]),
        (CHUNKING_CHIP, (2, [30, 34]), [(2, []), (0, [30, 34])]),
        (CHUNKING_CHIP, (2, []), [(2, [])]),
        (SLOT_CHIP, (1, [300, 40]), [(1, []), (0, [300]), (0, [40])]),
        (BLOCK_CHIP, (4, [1, 1, 1, 1]), [(4, [1, 1, 1, 1])]),
    ],
)
def test_calls_of_a_step(
    device: Capabilities, lengths: tuple[int, list[int]], calls: list[tuple[int, list[int]]]
) -> None:
    rows = [*[D] * lengths[0], *map(row, lengths[1])]
    result = split(rows, plan_for(device))
    assert [(sum(r.is_decode for r in call), [r.length for r in call if not r.is_decode]) for call in result] == calls


def test_prompts_per_call_is_kept() -> None:
    rows = [D, row(5), row(6), row(7)]
    assert [len(call) for call in split(rows, plan_for(CPU, prompts_per_call=2))] == [3, 1]


def test_a_step_that_one_call_holds_is_passed_on_as_it_is() -> None:
    rows = [row(5), D, row(6)]
    assert split(rows, plan_for(CPU))[0] is rows


@pytest.mark.parametrize("device", ALL)
def test_decode_rows_before_prompts_stay_in_order(device: Capabilities) -> None:
    rows = [*(row(1, 100 + i, is_decode=True) for i in range(3)), row(40), row(50), row(20), row(10)]
    calls = split(rows, plan_for(device, prompts_per_call=2))
    assert [id(r) for call in calls for r in call] == list(map(id, rows))


steps = st.tuples(st.integers(0, 4), st.lists(st.integers(1, 64), max_size=4)).filter(lambda step: step[0] or step[1])


@given(st.sampled_from(ALL), steps, st.none() | st.integers(1, 4), st.randoms())
def test_every_row_goes_once_into_a_call_that_a_shape_holds(
    device: Capabilities, step: tuple[int, list[int]], prompts_per_call: int | None, random: object
) -> None:
    plan = plan_for(device, prompts_per_call)
    rows = [*(row(1, 100 + i, is_decode=True) for i in range(step[0])), *map(row, step[1])]
    random.shuffle(rows)  # type: ignore[attr-defined]
    calls = split(rows, plan)
    assert sorted(id(r) for call in calls for r in call) == sorted(map(id, rows))
    assert sum(any(r.is_decode for r in call) for call in calls) == (step[0] > 0)
    for call in calls:
        assert plan.covers(demand_of(call))
        assert sum(not r.is_decode for r in call) <= plan.prompts_per_call
