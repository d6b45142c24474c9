"""TGI's metrics of batches and of the queue: what the engine counted, under TGI's names.

TGI's batch is the engine's step. A step with prompts in it is a `prefill`, also where rows that decode share it (TGI
counts its chunked batches so), any other is a `decode`. The stages of a step are TGI's `forward` (the device),
`decode` (tokens drawn and reported), `filter` (requests leave and join) and `concat` (the same, of a step in which
requests joined others that were running).

Knows the worker's snapshots and vLLM's gauges. Several engines are added up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from neuronserve.neuron_worker.metrics import BATCH_SIZE_BUCKETS, DURATION_BUCKETS

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Snapshot = Mapping[str, Any]
Kind = Mapping[str, Any]
Totals = Mapping[str, Any]  # {"counts": ..., "sum": ...}

METHODS: Mapping[str, tuple[str, ...]] = {"prefill": ("prefill", "mixed"), "decode": ("decode",)}
"""TGI's `method` -> the worker's kinds of step."""

QUANTILES = (0.0, 0.5, 0.9, 0.95, 0.99, 0.999, 1.0)

_STAGES = {
    "inference": ("seconds", "Batch inference duration"),
    "forward": ("device_seconds", "Batch forward duration per method (prefill or decode)"),
    "decode": ("sample_seconds", "Time spent decoding a batch per method (prefill or decode)"),
    "filter": (
        "apply_seconds",
        "Time spent filtering batches and sending generated tokens per method (prefill or decode)",
    ),
}


def families(scraped: Iterable[Metric], snapshots: Sequence[Snapshot], config: VllmConfig) -> Iterator[Metric]:
    """`scraped`: what is in the registry, vLLM's gauges among it."""
    yield from _gauges(scraped, config, len(snapshots))
    if snapshots:
        yield from _inference(snapshots)
        yield from _batches(snapshots)
        yield skipped_tokens(snapshots)


def _gauges(scraped: Iterable[Metric], config: VllmConfig, num_engines: int) -> Iterator[Metric]:
    now = {family.name: sum(sample.value for sample in family.samples) for family in scraped}
    waiting, running = (now.get(f"vllm:num_requests_{state}") for state in ("waiting", "running"))
    if waiting is not None:  # --disable-log-stats leaves them out
        yield GaugeMetricFamily("tgi_queue_size", "Current queue size", waiting)
    if running is not None:
        length = config.model_config.max_model_len
        yield GaugeMetricFamily("tgi_batch_current_size", "Current batch size", running)
        yield GaugeMetricFamily(
            "tgi_batch_current_max_tokens", "Maximum tokens for the current batch", running * length
        )
    cache = config.cache_config
    if cache.num_gpu_blocks is not None:
        usable = cache.num_gpu_blocks - num_engines  # each engine has a block that is nobody's
        yield GaugeMetricFamily(
            "tgi_batch_max_total_tokens", "Maximum tokens of all running requests", usable * cache.block_size
        )


def _inference(snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    by_method = {method: (_sum(snapshots, method, "steps"), _sum(snapshots, method, "failed")) for method in METHODS}
    for name, which in {"count": "Number of", "success": "Number of successful", "failure": "Number of failed"}.items():
        help = f"{which} inference calls per method (prefill or decode)"
        family = CounterMetricFamily(f"tgi_batch_inference_{name}", help, labels=("method",))
        for method, (steps, failed) in by_method.items():
            family.add_metric((method,), {"count": steps, "success": steps - failed, "failure": failed}[name])
        yield family
    for stage, (name, text) in _STAGES.items():
        stages = HistogramMetricFamily(f"tgi_batch_{stage}_duration", text, labels=("method",))
        for method in METHODS:
            _add(stages, (method,), _totals(snapshots, method, name), DURATION_BUCKETS)
        yield stages


def _batches(snapshots: Sequence[Snapshot]) -> Iterator[Metric]:
    size = HistogramMetricFamily("tgi_batch_next_size", "Batch size of the next batch", labels=())
    _add(size, (), [snapshot["joined"] for snapshot in snapshots], BATCH_SIZE_BUCKETS)
    yield size
    concat = CounterMetricFamily(
        "tgi_batch_concat", "Number of batches that joined a running one, by reason", labels=("reason",)
    )
    kinds = {"chunking": "mixed", "backpressure": "prefill"}  # in one step with the running rows, or before them
    for reason, kind in kinds.items():
        concat.add_metric((reason,), sum(snapshot["kinds"][kind]["extended"] for snapshot in snapshots))
    concat.add_metric(("wait_exceeded",), 0)  # vLLM's scheduler lets requests in as soon as there is room
    yield concat
    duration = HistogramMetricFamily("tgi_batch_concat_duration", "Time spent joining batches", labels=("method",))
    _add(duration, ("decode",), _totals(snapshots, "prefill", "join_seconds"), DURATION_BUCKETS)
    yield duration


def skipped_tokens(snapshots: Sequence[Snapshot]) -> Metric:
    """Drafted tokens that a row kept in a step: of all rows that got a token since the start."""
    rows: dict[int, int] = {}
    for snapshot in snapshots:
        drawn = snapshot["rows_sampled_on_device"] + snapshot["rows_sampled_on_host"]
        kept = dict(map(tuple, snapshot["accepted_drafts"]))
        for tokens, count in {0: drawn - sum(kept.values()), **kept}.items():
            rows[tokens] = rows.get(tokens, 0) + count
    family = Metric("tgi_request_skipped_tokens", "Speculated tokens per request", "summary")
    for quantile in QUANTILES:
        family.add_sample(family.name, {"quantile": f"{quantile:g}"}, _quantile(rows, quantile))
    family.add_sample(f"{family.name}_sum", {}, sum(tokens * count for tokens, count in rows.items()))
    family.add_sample(f"{family.name}_count", {}, sum(rows.values()))
    return family


def _quantile(rows: Mapping[int, int], quantile: float) -> float:
    wanted, reached = quantile * sum(rows.values()), 0
    for tokens in sorted(rows):
        reached += rows[tokens]
        if reached >= wanted and rows[tokens]:
            return tokens
    return 0.0


def _kinds(snapshots: Sequence[Snapshot], method: str) -> list[Kind]:
    return [snapshot["kinds"][kind] for snapshot in snapshots for kind in METHODS[method]]


def _sum(snapshots: Sequence[Snapshot], method: str, name: str) -> int:
    return sum(int(kind[name]) for kind in _kinds(snapshots, method))


def _totals(snapshots: Sequence[Snapshot], method: str, name: str) -> list[Totals]:
    return [kind[name] for kind in _kinds(snapshots, method)]


def _add(
    family: HistogramMetricFamily, labels: tuple[str, ...], totals: Sequence[Totals], bounds: Sequence[float]
) -> None:
    counts = accumulate(map(sum, zip(*(total["counts"] for total in totals), strict=True)))
    names = [*map(floatToGoString, bounds), "+Inf"]
    family.add_metric(labels, list(zip(names, counts, strict=True)), sum(total["sum"] for total in totals))
