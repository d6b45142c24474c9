"""TGI's metrics of requests, under TGI's names, with its types, labels and buckets.

The routes tell a `Recorder` what happens to a request, and nothing else in the process does. In its life a request of
a TGI route makes these calls, in this order:

    request_started      its body was parsed as JSON of the right shape; before validation
    request_validated    validation is over: its tokens are counted and its limits hold
    request_success      its last token is there, just before the answer (or the stream's last event) is sent
    request_failure      instead of the above, from anywhere after `request_started`; and then nothing more

An instance of /vertex that ends because another one failed is counted as started alone.
A request with `best_of` is one request: `request_validated` once per request, `request_success` with the timings of
the whole and the tokens of the sequence that is returned. `tgi_batch_*` and `tgi_queue_size` come from the engine at
scrape (`server/tgi/engine_metrics.py`); the routes have no part in them.

Several API processes are prometheus_client's affair: vLLM sets its directory, every process writes its own values and
whichever answers a scrape adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram

from neuronserve.neuron_worker.metrics import DURATION_BUCKETS

FailureKind = Literal["validation", "overloaded", "generation", "incomplete", "dropped", "template"]
"""`dropped`: the client left before its answer was complete. The others are the error types of the answer:
`template` covers `template_error` and `missing_template_variable`, `incomplete` both incomplete generations."""


def token_buckets(limit: int) -> tuple[float, ...]:
    """A hundred of equal width up to `limit`."""
    return tuple(limit / 100 * (step + 1) for step in range(100))


@dataclass(frozen=True)
class Timings:
    """One request's times in seconds. Filled by the routes; the response headers show the same numbers."""

    total: float  # from the body's arrival to the last token
    validation: float  # of these, until the engine was given the request
    queue: float  # then until it was first scheduled
    inference: float  # then until its last token

    def per_token(self, generated_tokens: int) -> float:
        return self.inference / max(1, generated_tokens)


class Recorder:
    """One per API process; the names can be registered only once in a registry."""

    def __init__(self, max_input_tokens: int, max_total_tokens: int, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, help: str, *labels: str) -> Counter:
            return Counter(name, help, labels, registry=registry)

        def histogram(name: str, help: str, buckets: tuple[float, ...] = DURATION_BUCKETS) -> Histogram:
            return Histogram(name, help, buckets=buckets, registry=registry)

        total_buckets = token_buckets(max_total_tokens)
        self._count = counter("tgi_request_count", "Total number of requests")
        self._success = counter("tgi_request_success", "Number of successful requests")
        self._failure = counter("tgi_request_failure", "Number of failed requests by kind of error", "err")
        self._duration = histogram("tgi_request_duration", "Total time spent processing the request")
        self._validation = histogram("tgi_request_validation_duration", "Time spent validating the request")
        self._queue = histogram("tgi_request_queue_duration", "Time spent in the queue per request")
        self._inference = histogram("tgi_request_inference_duration", "Request inference duration")
        self._per_token = histogram("tgi_request_mean_time_per_token_duration", "Mean time per token per request")
        self._input_length = histogram(
            "tgi_request_input_length", "Input token length per request", token_buckets(max_input_tokens)
        )
        self._max_new_tokens = histogram("tgi_request_max_new_tokens", "Maximum new tokens per request", total_buckets)
        self._generated = histogram("tgi_request_generated_tokens", "Generated tokens per request", total_buckets)

    def request_started(self) -> None:
        self._count.inc()

    def request_validated(self, input_tokens: int, max_new_tokens: int) -> None:
        """`input_tokens`: after truncation. `max_new_tokens`: the request's own, or the default it got."""
        self._input_length.observe(input_tokens)
        self._max_new_tokens.observe(max_new_tokens)

    def request_success(self, timings: Timings, generated_tokens: int) -> None:
        self._success.inc()
        self._duration.observe(timings.total)
        self._validation.observe(timings.validation)
        self._queue.observe(timings.queue)
        self._inference.observe(timings.inference)
        self._per_token.observe(timings.per_token(generated_tokens))
        self._generated.observe(generated_tokens)

    def request_failure(self, kind: FailureKind) -> None:
        self._failure.labels(kind).inc()
