"""The OpenAI routes' requests in TGI's metrics, where TGI counts them too. vLLM answers them, so they are counted when
the engine says that one has ended. What is refused never reaches the engine, and is counted by its answer's status
(`openai_headers.CountingRefusals`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.engine import FinishReason
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from .generate import REQUEST_PREFIX
from .metrics import FailureKind, Recorder, Timings

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats

_FAILURES: dict[FinishReason, FailureKind] = {FinishReason.ABORT: "dropped", FinishReason.ERROR: "generation"}


def watch(engine: EngineClient, recorder: Recorder) -> None:
    """From now on. Without vLLM's statistics (--disable-log-stats) there is nothing to see."""
    manager = getattr(engine, "logger_manager", None)
    if manager is not None:
        manager.stat_loggers.append(OpenAiRequests(recorder))


class OpenAiRequests(AggregateStatLoggerBase):
    """Called by vLLM after each step, with the requests of this process that ended in it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def log_engine_initialized(self) -> None:
        pass

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        for ended in iteration_stats.finished_requests if iteration_stats is not None else ():
            if not str(ended.request_id).startswith(REQUEST_PREFIX):
                self._count(ended)

    def _count(self, ended: FinishedRequestStats) -> None:
        recorder = self._recorder
        recorder.request_started()
        recorder.request_validated(ended.num_prompt_tokens, ended.max_tokens_param or 0)
        failure = _FAILURES.get(ended.finish_reason)
        if failure is None:
            recorder.request_success(_timings(ended), ended.num_generation_tokens)
        else:
            recorder.request_failure(failure)


def _timings(ended: FinishedRequestStats) -> Timings:
    """vLLM counts from the request's arrival in the engine's front end, where it is already tokenized."""
    queue, inference = max(0.0, ended.queued_time), max(0.0, ended.inference_time)
    total = max(ended.e2e_latency, queue + inference)
    return Timings(total, total - queue - inference, queue, inference)
