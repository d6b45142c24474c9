"""The report: what it must say, and that it fits a terminal."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from neuronserve.bucketing.errors import TooManyShapes
from neuronserve.bucketing.memory import MemoryFacts
from neuronserve.bucketing.plan import PlanRequest, make_plan
from neuronserve.bucketing.report import COLUMNS, headline, padding, render
from neuronserve.neuron_worker.device.base import Capabilities

from .devices import CPU, SLOT_CHIP
from .test_plan import devices, requests

GIB = 2**30
LLAMA_8B = MemoryFacts(
    weight_bytes=16 * GIB, num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128, kv_bytes=2, cores=2
)


def test_a_small_plan_in_full() -> None:
    plan = make_plan(PlanRequest(4, 512, 512, context_buckets=(128, 256)), SLOT_CHIP)
    assert render(plan, replace(LLAMA_8B, scratch_bytes=GIB // 2)) == "\n".join(
        [
            "5 graphs: 2 prefill, 3 decode",
            "4 sequences of up to 512 tokens, prompts up to 256 tokens, each whole, 1 per call",
            "",
            "kind     graphs  sizes",
            "prefill       2  128 256 prompt tokens, each a whole context",
            "decode        3  rows 4; context 128 256 512",
            "",
            "padding           bucket        serves   mean  worst",
            "prompt tokens        128         1-128    50%    99%",
            "                     256       129-256    25%    50%",
            "decode rows            4           1-4    38%    75%",
            "decode context       128         1-128    50%    99%",
            "                     256       129-256    25%    50%",
            "                     512       257-512    25%    50%",
            "",
            "memory on each of 2 cores",
            "  weights      8.000 GiB",
            "  KV cache     0.125 GiB  4 x 512 tokens of 65536 bytes",
            "  scratch      0.500 GiB",
            "  total        8.625 GiB  of 16.000 GiB: fits",
            "",
            "note: prompts above 256 tokens will be refused: NEURON_CONTEXT_LENGTH_BUCKETS=128,256 on slot-chip",
        ]
    )


def test_a_cache_shared_over_the_sequence_says_by_how_many_cores() -> None:
    plan = make_plan(PlanRequest(4, 512, 512), SLOT_CHIP)
    text = render(plan, replace(LLAMA_8B, cores=24, cores_per_line=3, line_padding=128))
    assert "  KV cache     0.013 GiB  4 x 512 tokens of 16384 bytes, each sequence over 3 cores" in text


def test_headline_counts_graphs_by_kind() -> None:
    assert headline(make_plan(PlanRequest(16, 2048, 32), CPU)) == "61 graphs: 12 prefill, 24 mixed, 25 decode"


def test_padding_is_a_share_of_what_is_computed() -> None:
    # 3 or 4 rows in a graph of 4: one padded row in four, or none.
    assert padding(3, 4) == (0.125, 0.25)


def test_what_does_not_fit_names_batch_and_length_that_do() -> None:
    plan = make_plan(PlanRequest(32, 8192, 8192), SLOT_CHIP)
    text = render(plan, LLAMA_8B)
    assert "does not fit" in text
    # 8 GiB left for tokens of 64 KiB: 131072
    assert "largest that fits: --max-num-seqs 16 at 8192 tokens, or --max-model-len 4096 at 32 sequences" in text


def test_weights_that_do_not_fit_ask_for_cores() -> None:
    text = render(make_plan(PlanRequest(1, 128, 128), SLOT_CHIP), replace(LLAMA_8B, weight_bytes=140 * GIB))
    assert "the weights alone do not fit: at least 9 cores" in text


def test_weights_that_do_not_fit_ask_for_cores_that_work_as_one() -> None:
    plan, facts = make_plan(PlanRequest(1, 128, 128), SLOT_CHIP), replace(LLAMA_8B, weight_bytes=140 * GIB)
    assert "fit: at least 12 cores, or int8" in render(plan, replace(facts, core_counts=(1, 2, 4, 8, 12)))


def test_weights_that_do_not_fit_ask_for_no_cores_where_there_can_be_no_more() -> None:
    plan, facts = make_plan(PlanRequest(1, 128, 128), SLOT_CHIP), replace(LLAMA_8B, weight_bytes=140 * GIB, cores=1)
    text = render(plan, replace(facts, core_counts=(1,)))
    assert "the weights alone do not fit, and this device uses 1 core: int8 weights, or a smaller model" in text
    text = render(plan, replace(facts, core_counts=(1, 8)))
    assert "the weights alone do not fit, and this device uses at most 8 cores: int8 weights" in text


def test_scratch_that_does_not_fit() -> None:
    text = render(make_plan(PlanRequest(1, 128, 128), SLOT_CHIP), replace(LLAMA_8B, scratch_bytes=17 * GIB))
    assert "scratch memory alone" in text


@given(requests(), devices, st.integers(0, 300 * GIB))
def test_every_report_is_readable_in_a_terminal(request: PlanRequest, device: Capabilities, weight_bytes: int) -> None:
    try:
        plan = make_plan(request, device)
    except TooManyShapes:
        return
    text = render(plan, replace(LLAMA_8B, weight_bytes=weight_bytes))
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert headline(plan) in text
