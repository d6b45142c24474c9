"""The plan: which graphs exist, that every legal step has one, and that the cheapest is chosen."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuronserve.bucketing.errors import BadBuckets, BucketError, DoesNotFit, TooManyShapes
from neuronserve.bucketing.plan import MAX_GRAPHS, Plan, PlanRequest, cost, make_plan
from neuronserve.bucketing.shape import StepDemand, holds
from neuronserve.neuron_worker.device.base import Capabilities, StepShape

from .devices import ALL, BLOCK_CHIP, CHUNKING_CHIP, CPU, FUSED_CHIP, SLOT_CHIP

FINE = (16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 240, 256)


def product(rows: tuple[int, ...], tokens: tuple[int, ...], contexts: tuple[int, ...]) -> set[StepShape]:
    return {StepShape(r, 1, t, c) for r in rows for t in tokens for c in contexts}


buckets = st.none() | st.lists(st.integers(1, 40_000), min_size=1, max_size=8).map(tuple)


@st.composite
def requests(draw: st.DrawFn, with_buckets: bool = True) -> PlanRequest:
    max_model_len = draw(st.integers(1, 140_000))
    token_buckets = draw(buckets) if with_buckets else None
    return PlanRequest(
        max_num_seqs=draw(st.integers(1, 256)),
        max_model_len=max_model_len,
        block_size=draw(st.sampled_from([8, 16, 32, max_model_len])),
        chunk_tokens=draw(st.none() | st.integers(1, 4096)),
        context_buckets=draw(buckets) if with_buckets else None,
        token_generation_buckets=None if token_buckets is None else (*token_buckets, max_model_len),
        decode_width=draw(st.integers(1, 6)),
    )


devices = st.sampled_from(ALL)


# What the defaults are.


def test_cpu_defaults() -> None:
    plan = make_plan(PlanRequest(max_num_seqs=16, max_model_len=2048, block_size=32), CPU)
    assert set(plan.shapes) == (
        product((1, 2, 4, 8, 16), (0,), (128, 256, 512, 1024, 2048))
        | product((0,), FINE, (2048,))
        | product((4, 16), FINE, (2048,))
    )
    assert len(plan.shapes) == 61
    assert (plan.chunk_tokens, plan.prompts_per_call, plan.largest_prompt, plan.notes) == (256, 16, 2048, ())


def test_long_contexts_on_cpu_thin_the_contexts_first() -> None:
    plan = make_plan(PlanRequest(max_num_seqs=16, max_model_len=8192, block_size=32), CPU)
    decode = {shape for shape in plan.shapes if shape.kind == "decode"}
    assert decode == product((1, 2, 4, 8, 16), (0,), (128, 512, 1024, 4096, 8192))
    assert len(plan.shapes) == 61


def test_slot_chip_defaults() -> None:
    plan = make_plan(PlanRequest(max_num_seqs=4, max_model_len=1024, block_size=1024), SLOT_CHIP)
    assert plan.shapes == (
        *(StepShape(0, 1, size, size) for size in (128, 256, 512, 1024)),
        *(StepShape(4, 1, 0, size) for size in (128, 256, 512, 1024)),
    )
    assert (plan.chunk_tokens, plan.prompts_per_call, plan.largest_prompt) == (None, 1, 1024)


def test_slot_chip_with_long_contexts_keeps_to_eight_graphs() -> None:
    plan = make_plan(PlanRequest(max_num_seqs=4, max_model_len=8192, block_size=8192), SLOT_CHIP)
    assert plan.shapes == (
        *(StepShape(0, 1, size, size) for size in (128, 512, 1024, 4096, 8192)),
        *(StepShape(4, 1, 0, size) for size in (256, 2048, 8192)),
    )


def test_block_chip_defaults() -> None:
    plan = make_plan(PlanRequest(max_num_seqs=8, max_model_len=2048, block_size=32), BLOCK_CHIP)
    assert set(plan.shapes) == (
        product((8,), (0,), (256, 512, 2048))
        | product((0,), (32, 128, 256, 512), (2048,))
        | product((8,), (512,), (2048,))
    )


def test_verifying_drafts_adds_shapes_of_that_width() -> None:
    plan = make_plan(
        PlanRequest(max_num_seqs=2, max_model_len=256, block_size=16, chunk_tokens=16, decode_width=4), CPU
    )
    assert set(plan.shapes) == {
        *(StepShape(rows, width, 0, context) for rows in (1, 2) for width in (1, 4) for context in (128, 256)),
        StepShape(0, 1, 16, 256),
        *(StepShape(rows, width, 16, 256) for rows in (1, 2) for width in (1, 4)),
    }


def test_where_drafts_are_made_inside_a_call_every_decode_is_wide() -> None:
    request = PlanRequest(max_num_seqs=2, max_model_len=256, block_size=256, decode_width=4)
    assert make_plan(request, FUSED_CHIP).decode_widths == (4,)
    assert make_plan(request, SLOT_CHIP).decode_widths == (1, 4)
    assert make_plan(PlanRequest(2, 256, 256), FUSED_CHIP).decode_widths == (1,)


# The user's own buckets.


def test_given_buckets_are_used_exactly() -> None:
    request = PlanRequest(1, 1024, 32, context_buckets=(512, 128, 512), token_generation_buckets=(1024, 100))
    plan = make_plan(request, CPU)
    assert set(plan.shapes) == (
        product((1,), (0,), (100, 1024)) | product((0,), (128, 512), (1024,)) | product((1,), (128, 512), (1024,))
    )
    assert plan.chunk_tokens == 512
    assert plan.notes == ()


@pytest.mark.parametrize(
    ("chunk", "expected", "widths", "note"),
    [
        (512, 512, (128, 512), "1024 not used with chunks of 512"),
        (300, 300, (128, 512), "1024 not used with chunks of 300"),
        (1024, 1024, (128, 512, 1024), None),
        (4096, 1024, (128, 512, 1024), "chunks of 1024 tokens, not 4096"),
    ],
)
def test_chunks_meet_given_buckets(chunk: int, expected: int, widths: tuple[int, ...], note: str | None) -> None:
    plan = make_plan(PlanRequest(4, 2048, 32, chunk_tokens=chunk, context_buckets=(128, 512, 1024)), CPU)
    assert plan.chunk_tokens == expected
    assert plan.prefill_tokens == (0, *widths)
    assert [note in line for line in plan.notes] == ([] if note is None else [True])


def test_buckets_above_the_limit_are_lowered_to_it() -> None:
    request = PlanRequest(4, 1000, 8, context_buckets=(128, 2048), token_generation_buckets=(512, 2048, 4096))
    plan = make_plan(request, SLOT_CHIP)
    assert plan.shapes == (StepShape(0, 1, 128, 128), StepShape(0, 1, 1000, 1000), *product_of_four((512, 1000)))
    assert plan.notes == (
        "NEURON_TOKEN_GEN_BUCKETS: 2048,4096 lowered to --max-model-len 1000",
        "NEURON_CONTEXT_LENGTH_BUCKETS: 2048 lowered to --max-model-len 1000",
    )


def product_of_four(contexts: tuple[int, ...]) -> list[StepShape]:
    return [StepShape(4, 1, 0, context) for context in contexts]


def test_token_generation_buckets_must_reach_the_limit() -> None:
    with pytest.raises(BadBuckets) as error:
        make_plan(PlanRequest(4, 2048, 32, token_generation_buckets=(128, 512)), CPU)
    assert "NEURON_TOKEN_GEN_BUCKETS=128,512" in str(error.value)
    assert "add 2048, or serve with --max-model-len 512" in str(error.value)


def test_short_context_buckets_limit_whole_prompts_and_say_so() -> None:
    plan = make_plan(PlanRequest(4, 2048, 2048, context_buckets=(128, 512)), SLOT_CHIP)
    assert plan.largest_prompt == 512
    assert "prompts above 512 tokens will be refused" in plan.notes[0]
    with pytest.raises(DoesNotFit, match="513 prompt tokens, largest compiled size is 512; add a bucket"):
        plan.choose(StepDemand(0, 1, 513, 513))


def test_short_context_buckets_serve_any_prompt_in_chunks() -> None:
    plan = make_plan(PlanRequest(4, 2048, 32, context_buckets=(128, 512)), CPU)
    assert plan.largest_prompt == 2048
    assert plan.choose(StepDemand(0, 1, 512, 2048)) == StepShape(0, 1, 512, 2048)


def test_more_than_256_graphs_are_refused() -> None:
    request = PlanRequest(1, 4096, 16, token_generation_buckets=tuple(range(16, 4097, 16)))
    with pytest.raises(TooManyShapes, match=r"258 graphs \(256 decode, 1 prefill, 1 mixed\), at most 256"):
        make_plan(request, CPU)


def test_given_buckets_may_exceed_the_default_number_of_graphs() -> None:
    contexts = tuple(range(32, 2049, 32))
    plan = make_plan(PlanRequest(1, 2048, 16, token_generation_buckets=contexts), CPU)
    assert set(contexts) <= set(plan.contexts)
    assert 64 < len(plan.shapes) <= MAX_GRAPHS


@pytest.mark.parametrize("name", ["max_num_seqs", "max_model_len", "block_size", "chunk_tokens", "decode_width"])
def test_limits_are_positive(name: str) -> None:
    limits = {"max_num_seqs": 1, "max_model_len": 1, "block_size": 1, name: 0}
    with pytest.raises(BadBuckets, match=f"{name} is 0"):
        PlanRequest(**limits)


@pytest.mark.parametrize("empty_or_bad", [(), (0, 2048), (-1,)])
def test_buckets_are_positive(empty_or_bad: tuple[int, ...]) -> None:
    with pytest.raises(BadBuckets, match="NEURON_TOKEN_GEN_BUCKETS"):
        make_plan(PlanRequest(1, 2048, 32, token_generation_buckets=empty_or_bad), CPU)


# What holds of every plan.


@given(requests(with_buckets=False), devices)
def test_defaults_stay_within_the_devices_number_of_graphs(request: PlanRequest, device: Capabilities) -> None:
    assert len(make_plan(request, device).shapes) <= device.default_max_graphs


@given(requests(), devices)
def test_no_plan_exceeds_256_graphs(request: PlanRequest, device: Capabilities) -> None:
    try:
        plan = make_plan(request, device)
    except TooManyShapes:
        return
    assert 1 <= len(plan.shapes) <= MAX_GRAPHS
    assert plan.shapes == tuple(sorted(set(plan.shapes)))


@given(requests(), devices, st.data())
def test_every_batch_and_every_length_is_served(
    request: PlanRequest, device: Capabilities, data: st.DataObject
) -> None:
    plan = make_plan(request, device)
    rows = data.draw(st.integers(1, request.max_num_seqs))
    width = data.draw(st.integers(1, request.decode_width))
    context = data.draw(st.integers(1, request.max_model_len))
    assert plan.covers(StepDemand(rows, width, 0, context))

    if plan.chunk_tokens is None:
        prompt = data.draw(st.integers(1, plan.largest_prompt))
        assert plan.covers(StepDemand(0, 1, prompt, prompt))
    else:
        assert plan.largest_prompt == request.max_model_len
        chunk = data.draw(st.integers(1, plan.chunk_tokens))
        assert plan.covers(StepDemand(0, 1, chunk, context))
        if device.mixes_prefill_and_decode:
            assert plan.covers(StepDemand(rows, width, chunk, context))


@given(requests(with_buckets=False), devices)
def test_by_default_a_prompt_may_be_as_long_as_the_model(request: PlanRequest, device: Capabilities) -> None:
    assert make_plan(request, device).largest_prompt == request.max_model_len


demands = st.builds(
    StepDemand,
    decode_rows=st.integers(0, 20),
    decode_width=st.integers(1, 6),
    prefill_tokens=st.integers(0, 300),
    context=st.integers(1, 2200),
)


@given(requests(), devices, st.lists(demands, min_size=1, max_size=20))
def test_choose_is_the_cheapest_holder(request: PlanRequest, device: Capabilities, wanted: list[StepDemand]) -> None:
    plan = make_plan(request, device)
    for demand in wanted:
        holders = [shape for shape in plan.shapes if holds(shape, demand)]
        assert plan.covers(demand) == bool(holders)
        if holders:
            assert cost(plan.choose(demand)) == min(cost(shape) for shape in holders)
        else:
            with pytest.raises(DoesNotFit):
                plan.choose(demand)


def test_fewer_tokens_are_cheaper_than_a_shorter_context() -> None:
    few, short = StepShape(0, 1, 64, 2048), StepShape(0, 1, 128, 512)
    plan = Plan((few, short), max_num_seqs=1, max_model_len=2048, block_size=32, prompts_per_call=1, chunk_tokens=128)
    assert plan.choose(StepDemand(0, 1, 50, 50)) == few
    assert plan.choose(StepDemand(0, 1, 100, 100)) == short


@given(requests(), devices)
def test_a_plan_is_a_function_of_its_arguments(request: PlanRequest, device: Capabilities) -> None:
    assert make_plan(request, device) == make_plan(request, device)


# What the errors say.


@pytest.mark.parametrize(
    ("demand", "numbers"),
    [
        (StepDemand(5, 1, 0, 10), "5 decode rows, largest compiled size is 4"),
        (StepDemand(1, 2, 0, 10), "2 tokens per decode row, largest compiled size is 1"),
        (StepDemand(0, 1, 600, 600), "600 prompt tokens, largest compiled size is 512"),
        (StepDemand(1, 1, 0, 3000), "3000 positions, largest compiled size is 2048"),
        (StepDemand(1, 1, 5, 10), "in separate calls"),
    ],
)
def test_a_step_that_fits_nowhere_names_the_numbers(demand: StepDemand, numbers: str) -> None:
    plan = make_plan(PlanRequest(4, 2048, 32), CHUNKING_CHIP)
    with pytest.raises(DoesNotFit, match=numbers):
        plan.choose(demand)


def test_every_error_is_one_kind() -> None:
    assert issubclass(DoesNotFit, BucketError)
    assert issubclass(TooManyShapes, BucketError)
