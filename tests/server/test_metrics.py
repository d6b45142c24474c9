"""What a scrape makes of the engines' counts, by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Metric

from neuronserve.neuron_worker.config import NeuronConfig, ServeRequest
from neuronserve.neuron_worker.metrics import Counters
from neuronserve.neuron_worker.resolve import resolve
from neuronserve.server.metrics import Engines, Snapshots, exposition, own_families
from neuronserve.server.tgi import engine_metrics
from neuronserve.server.tgi.metrics import Recorder, Timings
from neuronserve.speculative.settings import Speculation

from ..neuron_worker.tiny_model import tiny_model

PADDING = {"parts": {"decode": {"real": 3, "padded": 1}, "prefill": {"real": 5, "padded": 11}}}


def snapshot(counters: Counters) -> dict[str, Any]:
    return {**counters.snapshot(), "padding": PADDING}


def stepped(*steps: tuple[list[bool], int], failed: bool = False) -> Counters:
    """Steps, each by which of its rows decode and how many of its requests are new."""
    counters = Counters()
    for are_decode, joined in steps:
        counters.step_applied(0.0, sum(are_decode), num_rows=len(are_decode), num_joined=joined)
        counters.step_computed()
        counters.step_ended(failed=failed)
    return counters


def values(families: Iterable[Metric]) -> dict[str, float]:
    """`name{label values}` -> value."""
    samples = (sample for family in families for sample in family.samples)
    return {f"{sample.name}{{{','.join(sample.labels.values())}}}": sample.value for sample in samples}


PROMPTS_ALONE = ([False, False], 2)
BEFORE_THE_RUNNING = ([False], 0)  # the second chunk of one
MIXED = ([True, True, False], 1)
DECODE = ([True, True], 0)


def batches(*counters: Counters) -> dict[str, float]:
    snapshots = [snapshot(own) for own in counters]
    found = (*engine_metrics._inference(snapshots), *engine_metrics._batches(snapshots))
    return values(found)


def test_batches_of_two_engines_are_added_up() -> None:
    found = batches(stepped(PROMPTS_ALONE, BEFORE_THE_RUNNING, MIXED, DECODE, DECODE), stepped(PROMPTS_ALONE))

    assert found["tgi_batch_inference_count_total{prefill}"] == 4
    assert found["tgi_batch_inference_count_total{decode}"] == 2
    assert found["tgi_batch_forward_duration_count{prefill}"] == 4
    assert (found["tgi_batch_next_size_count{}"], found["tgi_batch_next_size_sum{}"]) == (3, 5)
    assert [found[f"tgi_batch_next_size_bucket{{{le}}}"] for le in ("1.0", "2.0", "1024.0", "+Inf")] == [1, 3, 3, 3]
    assert found["tgi_batch_concat_total{chunking}"] == found["tgi_batch_concat_duration_count{decode}"] == 1


def test_a_failed_step_is_a_failure_and_has_no_duration() -> None:
    found = batches(stepped(DECODE, failed=True))
    assert found["tgi_batch_inference_count_total{decode}"] == found["tgi_batch_inference_failure_total{decode}"] == 1
    assert found["tgi_batch_inference_success_total{decode}"] == 0
    assert found["tgi_batch_inference_duration_count{decode}"] == 0


def test_quantiles_of_accepted_drafts() -> None:
    counters = Counters(rows_sampled_on_device=6, rows_sampled_on_host=4)
    counters.accepted_drafts = {1: 4, 3: 1}  # so 5 rows of 10 kept none
    found = values([engine_metrics.skipped_tokens([snapshot(counters)])])
    quantiles = {q: found[f"tgi_request_skipped_tokens{{{q}}}"] for q in ("0", "0.5", "0.9", "0.95", "1")}
    assert quantiles == {"0": 0, "0.5": 0, "0.9": 1, "0.95": 3, "1": 3}
    assert (found["tgi_request_skipped_tokens_sum{}"], found["tgi_request_skipped_tokens_count{}"]) == (7, 10)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> NeuronConfig:
    model = tiny_model(tmp_path_factory.mktemp("model"))
    return resolve(ServeRequest(model, options={"backend": "arithmetic"}), {}).config


def test_ours_by_engine(config: NeuronConfig) -> None:
    counters = replace(stepped(MIXED), rows_sampled_on_host=2, device_restarts=1)
    found = values(own_families({"0": snapshot(stepped(DECODE)), "1": snapshot(counters)}, config))

    assert found["neuronserve_steps_total{0,decode}"] == 1
    assert found["neuronserve_tokens_total{1,prefill,padded}"] == 11
    assert found["neuronserve_sampled_rows_total{1,host}"] == 2
    assert [found[f"neuronserve_device_restarts_total{{{engine}}}"] for engine in "01"] == [0, 1]


def test_drafts_where_there_are_any(config: NeuronConfig) -> None:
    counters = Counters(decode_tokens=10, drafted_tokens=24, draft_seconds=0.5)
    counters.accepted_drafts = {1: 4, 3: 1}
    drafting = replace(config, speculation=Speculation("ngram", 4))
    found = values(own_families({"0": snapshot(counters)}, drafting))
    assert found["neuronserve_decode_rows_total{0}"] == 10
    assert found["neuronserve_draft_tokens_total{0,accepted}"] == 4 * 1 + 1 * 3
    assert found["neuronserve_draft_tokens_total{0,rejected}"] == 24 - 7
    assert found["neuronserve_draft_seconds_total{0}"] == 0.5
    assert not [name for name in values(own_families({"0": snapshot(counters)}, config)) if "draft" in name]


def test_an_engine_that_was_never_read_has_no_values(config: NeuronConfig) -> None:
    assert list(values(own_families({}, config))) == ["neuronserve_device_info{arithmetic,float32,none,1,device}"]


def test_tgi_s_counters_lose_the_suffix_and_others_keep_it(config: NeuronConfig) -> None:
    registry = CollectorRegistry()
    recorder = Recorder(100, 200, registry)
    recorder.request_started()
    recorder.request_success(Timings(4.0, 0.1, 0.4, 3.5), 7)
    recorder.request_failure("dropped")
    text = exposition([*registry.collect(), *own_families({"0": snapshot(Counters())}, config)]).decode()

    assert "# TYPE tgi_request_count counter\ntgi_request_count 1.0\n" in text
    assert 'tgi_request_failure{err="dropped"} 1.0\n' in text
    assert "tgi_request_mean_time_per_token_duration_sum 0.5\n" in text
    assert "# TYPE neuronserve_device_calls_total counter\n" in text
    assert "_created" not in text


FIRST: Snapshots = {"0": {"steps": 1}}


def test_the_engines_are_asked_once_in_a_second_whoever_scrapes() -> None:
    asked = 0

    async def read() -> Snapshots:
        nonlocal asked
        asked += 1
        await asyncio.sleep(0)
        return FIRST

    async def scrapes() -> Engines:
        engines = Engines(read)
        await asyncio.gather(*(engines.refresh() for _ in range(5)))
        await engines.refresh()
        return engines

    engines = asyncio.run(scrapes())
    assert (asked, engines.snapshots) == (1, FIRST)


def test_an_engine_that_is_gone_leaves_what_was_last_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronserve.server.metrics.KEPT_SECONDS", 0.0)
    answers = iter([FIRST])

    async def read() -> Snapshots:
        return next(answers)  # the second time: an error

    async def scrapes() -> Engines:
        engines = Engines(read)
        await engines.refresh()
        await engines.refresh()
        return engines

    assert asyncio.run(scrapes()).snapshots == FIRST


def test_a_slow_engine_is_waited_for_in_the_background() -> None:
    async def scrapes() -> None:
        answers: asyncio.Future[Snapshots] = asyncio.get_running_loop().create_future()
        engines = Engines(lambda: answers, patience=0.01)
        await engines.refresh()
        assert engines.snapshots == {}
        answers.set_result(FIRST)
        await asyncio.sleep(0)  # the answer is read without anybody asking
        await engines.refresh()
        assert engines.snapshots == FIRST

    asyncio.run(scrapes())
