"""GET /metrics: vLLM's metrics, TGI's where its routes are on, and our own of the device's side.

vLLM's and TGI's request metrics are in prometheus_client's registry already, of all API processes. What the worker
counted is asked of the engine when somebody scrapes, at most once a second, and every API process gets the same
answer. An engine that is slow to answer (it may be restarting its device) or dead leaves what was last known.

An endpoint plugin of its own, so it is there without TGI's routes too. Knows no TGI beyond the prefix of its names.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import State
from vllm.v1.metrics.prometheus import get_prometheus_registry

from neuronserve.neuron_worker.config import NeuronConfig

from .tgi import engine_metrics

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

logger = logging.getLogger(__name__)

Snapshot = Mapping[str, Any]
"""What one worker counted: `neuron_worker/metrics.py`."""

Snapshots = Mapping[str, Snapshot]
"""By vLLM's number of the engine."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
KEPT_SECONDS = 1.0
PATIENCE = 5.0
"""Seconds a scrape waits for the engine. Prometheus itself gives up after ten."""


class MetricsPlugin:
    name = "neuronserve_metrics"
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        app.get("/metrics", response_class=PlainTextResponse)(metrics)

    async def init_state(self, engine_client: EngineClient | None, state: State, args: Namespace) -> None:
        state.registry = get_prometheus_registry()
        state.engines = None if engine_client is None else Engines(reader(engine_client))


async def metrics(request: Request) -> Response:
    """All metrics as Prometheus reads them."""
    state = request.app.state
    families = list(state.registry.collect())
    engines: Engines | None = state.engines
    if engines is not None:
        await engines.refresh()
        snapshots, config = engines.snapshots, state.vllm_config
        if getattr(state, "tgi", None) is not None:
            families += engine_metrics.families(families, list(snapshots.values()), config)
        families += own_families(snapshots, NeuronConfig.of(config))
    return Response(exposition(families), media_type=CONTENT_TYPE)


class Engines:
    """The engines' own counts, read when they are older than a second."""

    def __init__(self, read: Callable[[], Awaitable[Snapshots]], patience: float = PATIENCE) -> None:
        self.snapshots: Snapshots = {}
        self._read, self._patience = read, patience
        self._read_at = self._asked_at = float("-inf")
        self._reading: asyncio.Task[None] | None = None

    async def refresh(self) -> None:
        if time.monotonic() - self._read_at < KEPT_SECONDS:
            return
        if self._reading is None or self._reading.done():
            self._asked_at = time.monotonic()
            self._reading = asyncio.create_task(self._keep())
        # Who comes while an answer is overdue does not wait as long again.
        await asyncio.wait([self._reading], timeout=max(0.0, self._asked_at + self._patience - time.monotonic()))

    async def _keep(self) -> None:
        try:
            self.snapshots = await self._read()
            self._read_at = time.monotonic()
        except Exception as error:  # of an engine that is gone; /health tells of it
            logger.debug("the engine's counts could not be read: %s", error)


def reader(client: EngineClient) -> Callable[[], Awaitable[Snapshots]]:
    """Of every engine of a data-parallel server: the public `collective_rpc` answers for the first one alone."""
    core: Any = client.engine_core  # type: ignore[attr-defined]

    async def read() -> Snapshots:
        answers = await core.call_utility_all_async("collective_rpc", "neuronserve_metrics", None, (), None)
        return {str(rank): workers[0] for rank, workers in zip(core.engine_ranks_managed, answers, strict=True)}

    return read


def own_families(snapshots: Snapshots, config: NeuronConfig) -> Iterator[Metric]:
    """`neuronserve_*`."""
    yield _device_info(config)
    yield _counter("steps", "Engine steps by what was in them", snapshots, ("kind",), _of_kinds("steps"))
    yield _counter("failed_steps", "Steps the device could not compute", snapshots, ("kind",), _of_kinds("failed"))
    yield _counter("tokens", "Tokens computed on the device", snapshots, ("part", "what"), _tokens)
    yield _counter("sampled_rows", "Tokens drawn, by where", snapshots, ("where",), _sampled)
    yield _counter("device_calls", "Calls of the device", snapshots, (), _plain("device_calls"))
    yield _counter("step_seconds", "Time in steps, by whose it was", snapshots, ("where",), _step_seconds)
    yield _counter("device_restarts", "Restarts of a lost device", snapshots, (), _plain("device_restarts"))
    if config.speculation is not None:
        yield _counter("decode_rows", "Rows of decode steps, drafts or none", snapshots, (), _plain("decode_tokens"))
        yield _counter("draft_tokens", "Drafts that were verified", snapshots, ("what",), _drafts)
        yield _counter("draft_seconds", "Device time of a draft model", snapshots, (), _plain("draft_seconds"))
    yield _gauge("compiled_shapes", "Shapes prepared at start", snapshots, "num_shapes")
    yield _gauge("warmup_seconds", "Time it took to prepare them", snapshots, "warmup_seconds")


Values = Mapping[tuple[str, ...], float]
"""Label values -> value."""


def _device_info(config: NeuronConfig) -> Metric:
    info = {
        "device": config.backend,
        "dtype": config.dtype,
        "quantization": config.quantization or "none",
        "cores": str(config.tensor_parallel_size),
        "sampling": config.sampling,
    }
    return InfoMetricFamily("neuronserve_device", "What computes the model", info)


def _counter(name: str, help: str, snapshots: Snapshots, labels: tuple[str, ...], read: Any) -> Metric:
    family = CounterMetricFamily(f"neuronserve_{name}", help, labels=("engine", *labels))
    for engine, snapshot in snapshots.items():
        values: Values = read(snapshot)
        for own, value in values.items():
            family.add_metric((engine, *own), value)
    return family


def _gauge(name: str, help: str, snapshots: Snapshots, key: str) -> Metric:
    family = GaugeMetricFamily(f"neuronserve_{name}", help, labels=("engine",))
    for engine, snapshot in snapshots.items():
        family.add_metric((engine,), snapshot[key])
    return family


def _plain(key: str) -> Any:
    return lambda snapshot: {(): snapshot[key]}


def _of_kinds(key: str) -> Any:
    return lambda snapshot: {(kind,): counts[key] for kind, counts in snapshot["kinds"].items()}


def _tokens(snapshot: Snapshot) -> Values:
    parts = snapshot["padding"]["parts"]
    return {(part, what): tally[what] for part, tally in parts.items() for what in ("real", "padded")}


def _sampled(snapshot: Snapshot) -> Values:
    return {(where,): snapshot[f"rows_sampled_on_{where}"] for where in ("device", "host")}


def _drafts(snapshot: Snapshot) -> Values:
    accepted = sum(kept * times for kept, times in snapshot["accepted_drafts"])
    return {("accepted",): accepted, ("rejected",): snapshot["drafted_tokens"] - accepted}


def _step_seconds(snapshot: Snapshot) -> Values:
    return {(where,): snapshot[f"{where}_seconds"] for where in ("device", "host")}


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


_SUFFIX = re.compile(rb"^((?:# (?:HELP|TYPE) )?tgi_\w+)_total\b", re.MULTILINE)


def exposition(families: Iterable[Metric]) -> bytes:
    """Prometheus' text. TGI's exporter does without the suffix that prometheus_client gives to counters, and without
    the time at which a series began."""
    for family in families:
        if family.name.startswith("tgi_"):
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
    return _SUFFIX.sub(rb"\1", generate_latest(_Families(families)))
