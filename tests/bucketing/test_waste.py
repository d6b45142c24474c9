"""Padding counters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from neuronserve.bucketing.shape import StepDemand
from neuronserve.bucketing.waste import PaddingCounters
from neuronserve.neuron_worker.device.base import StepShape


def test_nothing_counted_is_no_padding() -> None:
    nothing = {"real": 0, "padded": 0, "share": 0.0}
    assert PaddingCounters().snapshot() == {
        "steps": 0,
        "total": nothing,
        "parts": {"decode": nothing, "prefill": nothing},
        "kinds": {},
    }


def test_a_snapshot_adds_up_by_part_and_by_kind() -> None:
    counters = PaddingCounters()
    counters.add(StepShape(4, 1, 0, 128), StepDemand(3, 1, 0, 50))
    counters.add(StepShape(4, 1, 0, 128), StepDemand(4, 1, 0, 51))
    counters.add(StepShape(0, 1, 32, 128), StepDemand(0, 1, 20, 20))
    counters.add(StepShape(4, 1, 16, 128), StepDemand(1, 1, 16, 20))
    counters.add(StepShape(2, 3, 0, 128), StepDemand(1, 3, 0, 20))

    assert counters.snapshot() == {
        "steps": 5,
        "total": {"real": 47, "padded": 19, "share": 19 / 66},
        "parts": {
            "decode": {"real": 3 + 4 + 1 + 3, "padded": 18 - 11, "share": 7 / 18},
            "prefill": {"real": 36, "padded": 12, "share": 12 / 48},
        },
        "kinds": {
            "decode": {"real": 7, "padded": 1, "share": 1 / 8},
            "mixed": {"real": 17, "padded": 3, "share": 3 / 20},
            "prefill": {"real": 20, "padded": 12, "share": 12 / 32},
            "verify": {"real": 3, "padded": 3, "share": 3 / 6},
        },
    }


steps = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 9), st.integers(1, 3), st.integers(0, 5), st.integers(0, 5)).filter(
        lambda step: step[0] or step[1]
    )
)


@given(steps)
def test_real_and_padded_tokens_are_all_that_was_computed(given_steps: list[tuple[int, int, int, int, int]]) -> None:
    counters, computed, real = PaddingCounters(), 0, 0
    for rows, tokens, width, spare_rows, spare_tokens in given_steps:
        shape = StepShape(rows + spare_rows, width, tokens + spare_tokens, 64)
        counters.add(shape, StepDemand(rows, width, tokens, 10))
        computed += shape.num_tokens
        real += rows * width + tokens
    snapshot = counters.snapshot()
    total = snapshot["total"]
    assert (total["real"], total["real"] + total["padded"]) == (real, computed)
    for tallies in (snapshot["parts"], snapshot["kinds"]):
        assert sum(tally["real"] for tally in tallies.values()) == real
        assert sum(tally["padded"] for tally in tallies.values()) == computed - real
    assert total["share"] == ((computed - real) / computed if computed else 0.0)
