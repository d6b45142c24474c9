"""/metrics of a real server: TGI's names as its dashboards know them, our own, and vLLM's beside them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from ..tools.server import PATIENCE, VLLM, Server, free_port
from .conftest import FLAGS, LENGTH

DURATIONS = [pytest.approx(0.0001 * 1.5**k) for k in range(1, 36)]
BATCH_SIZES = list(range(1, 1025))
METHODS = {"method": {"prefill", "decode"}}
FAILURES = {"validation", "overloaded", "generation", "incomplete", "dropped", "template"}


def hundredths(limit: int) -> list[object]:
    return [pytest.approx(limit / 100 * step) for step in range(1, 101)]


COUNTERS: Mapping[str, Mapping[str, set[str]]] = {
    "tgi_request_count": {},
    "tgi_request_success": {},
    "tgi_request_failure": {"err": FAILURES},
    "tgi_batch_inference_count": METHODS,
    "tgi_batch_inference_success": METHODS,
    "tgi_batch_inference_failure": METHODS,
    "tgi_batch_concat": {"reason": {"backpressure", "wait_exceeded", "chunking"}},
}
GAUGES = ("tgi_queue_size", "tgi_batch_current_size", "tgi_batch_current_max_tokens", "tgi_batch_max_total_tokens")
HISTOGRAMS: Mapping[str, tuple[list[object], Mapping[str, set[str]]]] = {
    "tgi_request_duration": (DURATIONS, {}),
    "tgi_request_validation_duration": (DURATIONS, {}),
    "tgi_request_queue_duration": (DURATIONS, {}),
    "tgi_request_inference_duration": (DURATIONS, {}),
    "tgi_request_mean_time_per_token_duration": (DURATIONS, {}),
    "tgi_request_input_length": (hundredths(LENGTH - 1), {}),
    "tgi_request_generated_tokens": (hundredths(LENGTH), {}),
    "tgi_request_max_new_tokens": (hundredths(LENGTH), {}),
    "tgi_batch_next_size": (BATCH_SIZES, {}),  # type: ignore[dict-item]
    "tgi_batch_inference_duration": (DURATIONS, METHODS),
    "tgi_batch_forward_duration": (DURATIONS, METHODS),
    "tgi_batch_decode_duration": (DURATIONS, METHODS),
    "tgi_batch_filter_duration": (DURATIONS, METHODS),
    "tgi_batch_concat_duration": (DURATIONS, {"method": {"decode"}}),
}
SUMMARY = "tgi_request_skipped_tokens"

OURS: Mapping[str, tuple[str, set[str]]] = {
    "neuronserve_device_info": ("gauge", {"device", "dtype", "quantization", "cores", "sampling"}),
    "neuronserve_steps": ("counter", {"engine", "kind"}),
    "neuronserve_failed_steps": ("counter", {"engine", "kind"}),
    "neuronserve_tokens": ("counter", {"engine", "part", "what"}),
    "neuronserve_sampled_rows": ("counter", {"engine", "where"}),
    "neuronserve_device_calls": ("counter", {"engine"}),
    "neuronserve_step_seconds": ("counter", {"engine", "where"}),
    "neuronserve_device_restarts": ("counter", {"engine"}),
    "neuronserve_compiled_shapes": ("gauge", {"engine"}),
    "neuronserve_warmup_seconds": ("gauge", {"engine"}),
}


class Scrape:
    def __init__(self, server: Server) -> None:
        answer = httpx.get(f"{server.url}/metrics", timeout=PATIENCE)
        assert answer.status_code == 200
        self.content_type = answer.headers["content-type"]
        self.text = answer.text
        self.families: dict[str, Metric] = {found.name: found for found in text_string_to_metric_families(self.text)}

    def value(self, name: str, **labels: str) -> float:
        # The parser gives every counter its suffix, whether the text has it or not.
        samples = [sample for family in self.families.values() for sample in family.samples if sample.labels == labels]
        return sum(sample.value for sample in samples if sample.name in (name, f"{name}_total"))


def at_rest(server: Server) -> Scrape:
    """Nothing runs, and the engine's counts, which are at most a second old, have come to rest too."""
    server.wait_for_metric("vllm:num_requests_running", 0)
    before = None
    while before != (now := sum_of(Scrape(server), "tgi_batch_inference_count")):
        before = now
        time.sleep(1.2)
    return Scrape(server)


def generate(server: Server, **body: object) -> httpx.Response:
    return httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE)


@pytest.fixture(scope="module")
def scrape(server: Server) -> Scrape:
    """After one request that succeeded and one that failed."""
    assert generate(server, inputs="Hello", parameters={"max_new_tokens": 4}).status_code == 200
    assert generate(server, inputs="").status_code == 422
    return Scrape(server)


def labels_of(family: Metric) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for sample in family.samples:
        for label, value in sample.labels.items():
            if label != "le":
                found.setdefault(label, set()).add(value)
    return found


def test_no_name_of_tgi_is_missing_and_none_is_added(scrape: Scrape) -> None:
    ours = {name for name in scrape.families if name.startswith("tgi_")}
    assert ours == {*COUNTERS, *GAUGES, *HISTOGRAMS, SUMMARY}


@pytest.mark.parametrize("name", COUNTERS)
def test_counters_have_no_suffix(scrape: Scrape, name: str) -> None:
    family = scrape.families[name]
    assert family.type == "counter"
    assert f"\n# TYPE {name} counter\n" in scrape.text
    assert f"{name}_total" not in scrape.text
    assert f"{name}_created" not in scrape.text
    for label, values in labels_of(family).items():
        assert values <= COUNTERS[name][label]


def test_a_failure_is_counted_by_its_kind(scrape: Scrape) -> None:
    assert "validation" in labels_of(scrape.families["tgi_request_failure"])["err"]


@pytest.mark.parametrize("name", GAUGES)
def test_gauges_have_no_labels(scrape: Scrape, name: str) -> None:
    family = scrape.families[name]
    assert family.type == "gauge"
    assert [(sample.name, sample.labels) for sample in family.samples] == [(name, {})]


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_histograms_have_tgi_s_buckets(scrape: Scrape, name: str) -> None:
    family, (buckets, labels) = scrape.families[name], HISTOGRAMS[name]
    assert family.type == "histogram"
    assert {sample.name for sample in family.samples} == {f"{name}_{part}" for part in ("bucket", "sum", "count")}
    assert labels_of(family) == labels
    own = next(iter(labels.items()), None)
    one = [s for s in family.samples if own is None or s.labels[own[0]] == min(own[1])]
    bounds = [float(sample.labels["le"]) for sample in one if sample.name == f"{name}_bucket"]
    assert bounds == [*buckets, float("inf")]
    counts = [sample.value for sample in one if sample.name == f"{name}_bucket"]
    assert counts == sorted(counts)
    assert counts[-1] == next(sample.value for sample in one if sample.name == f"{name}_count")


def test_the_summary_has_tgi_s_quantiles(scrape: Scrape) -> None:
    family = scrape.families[SUMMARY]
    assert family.type == "summary"
    assert labels_of(family) == {"quantile": {"0", "0.5", "0.9", "0.95", "0.99", "0.999", "1"}}
    assert {sample.name for sample in family.samples} == {SUMMARY, f"{SUMMARY}_sum", f"{SUMMARY}_count"}


@pytest.mark.parametrize("name", OURS)
def test_ours(scrape: Scrape, name: str) -> None:
    kind, labels = OURS[name]
    family = scrape.families[name]
    assert family.type == kind
    assert labels_of(family).keys() == labels


def test_none_of_ours_is_undocumented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    exposed = {f"{name}_total" if kind == "counter" else name for name, (kind, _) in OURS.items()}
    missing = [name for name in (*exposed, *COUNTERS, *GAUGES, *HISTOGRAMS, SUMMARY) if f"`{name}`" not in page]
    assert not missing


def test_vllm_s_are_there_in_the_format_it_has(scrape: Scrape) -> None:
    assert scrape.content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert scrape.families["vllm:generation_tokens"].type == "counter"
    assert scrape.value("vllm:generation_tokens_total", engine="0", model_name="smollm2") > 0


def test_values_move_with_a_request(server: Server) -> None:
    before = at_rest(server)
    asked = {"max_new_tokens": 6, "details": True}
    assert generate(server, inputs="One, two, three", parameters=asked).status_code == 200
    server.wait_for_metric("tgi_batch_current_size", 0)
    # The engine's own counts are at most a second old.
    server.wait_for_metric("tgi_batch_inference_count", sum_of(before, "tgi_batch_inference_count") + 6)
    after = Scrape(server)

    def moved(name: str, **labels: str) -> float:
        return after.value(name, **labels) - before.value(name, **labels)

    assert moved("tgi_request_count") == moved("tgi_request_success") == 1
    assert moved("tgi_request_input_length_sum") == 5  # One , two , three
    assert moved("tgi_request_max_new_tokens_sum") == moved("tgi_request_generated_tokens_sum") == 6
    for name in ("duration", "validation_duration", "queue_duration", "inference_duration"):
        assert moved(f"tgi_request_{name}_count") == 1
    parts = sum(moved(f"tgi_request_{name}_duration_sum") for name in ("validation", "queue", "inference"))
    assert moved("tgi_request_duration_sum") == pytest.approx(parts)
    assert moved("tgi_request_mean_time_per_token_duration_sum") == pytest.approx(
        moved("tgi_request_inference_duration_sum") / 6
    )
    assert moved("tgi_batch_inference_count", method="prefill") == 1
    assert moved("tgi_batch_inference_success", method="decode") == 5
    assert moved("tgi_batch_next_size_sum") == 1
    assert moved("neuronserve_steps_total", engine="0", kind="decode") == 5
    assert moved("neuronserve_tokens_total", engine="0", part="prefill", what="real") == 5


def test_requests_of_the_openai_routes_count_too(server: Server) -> None:
    before = at_rest(server)
    body = {"model": "smollm2", "prompt": "One, two, three", "max_tokens": 6, "ignore_eos": True}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200
    server.wait_for_metric("tgi_request_success", before.value("tgi_request_success") + 1)
    after = Scrape(server)

    def moved(name: str) -> float:
        return after.value(name) - before.value(name)

    assert moved("tgi_request_count") == 1
    assert moved("tgi_request_input_length_sum") == 5
    assert moved("tgi_request_generated_tokens_sum") == moved("tgi_request_max_new_tokens_sum") == 6
    assert moved("tgi_request_inference_duration_sum") > 0
    assert moved("tgi_request_duration_sum") >= moved("tgi_request_inference_duration_sum")


def sum_of(scrape: Scrape, name: str) -> float:
    return sum(sample.value for sample in scrape.families[name].samples)


@pytest.fixture(scope="module")
def two_processes(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    command = [VLLM, "serve", str(smollm2), "--port", str(port), *FLAGS, "--api-server-count", "2"]
    server = Server(command, port, tmp_path_factory.mktemp("two") / "log")
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


@pytest.mark.full
def test_two_api_processes_answer_with_the_counts_of_both(two_processes: Server) -> None:
    num_requests = 12
    for _ in range(num_requests):  # a connection each, so that both processes get some
        assert generate(two_processes, inputs="Hello", parameters={"max_new_tokens": 2}).status_code == 200
        assert generate(two_processes, inputs="").status_code == 422

    for _ in range(num_requests):
        scrape = Scrape(two_processes)
        assert scrape.value("tgi_request_count") == 2 * num_requests
        assert scrape.value("tgi_request_duration_count") == num_requests
        assert scrape.value("tgi_request_failure", err="validation") == num_requests


@pytest.fixture(scope="module")
def without_tgi(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    command = [VLLM, "serve", str(smollm2), "--port", str(port), *FLAGS, "--no-tgi"]
    server = Server(command, port, tmp_path_factory.mktemp("no-tgi") / "log")
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


@pytest.mark.full
def test_ours_are_there_without_tgi_s_routes(without_tgi: Server) -> None:
    families = Scrape(without_tgi).families
    assert families.keys() >= OURS.keys()
    assert not [name for name in families if name.startswith("tgi_")]
