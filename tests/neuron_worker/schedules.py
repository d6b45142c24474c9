"""Scheduler outputs written by hand, in vLLM's own types."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput


def new(
    request_id: str,
    prompt: list[int],
    blocks: list[int],
    *,
    num_computed: int = 0,
    params: SamplingParams | None = None,
) -> NewRequestData:
    return NewRequestData(
        req_id=request_id,
        prompt_token_ids=prompt,
        mm_features=[],
        sampling_params=params or SamplingParams(temperature=0, max_tokens=100),
        pooling_params=None,
        block_ids=(blocks,),
        num_computed_tokens=num_computed,
        lora_request=None,
    )


class Cached:
    """One known request in a step. `tokens`: it resumes, and these are all its tokens."""

    def __init__(
        self, request_id: str, computed: int, blocks: list[int] | None = None, tokens: list[int] | None = None
    ):
        self.request_id, self.computed, self.blocks, self.tokens = request_id, computed, blocks, tokens


def step(
    scheduled: Mapping[str, int],
    *,
    news: Iterable[NewRequestData] = (),
    cached: Iterable[Cached] = (),
    finished: Iterable[str] = (),
    preempted: Iterable[str] = (),
) -> SchedulerOutput:
    """`scheduled`: how many tokens of each request, in the scheduler's order."""
    output = SchedulerOutput.make_empty()
    output.scheduled_new_reqs = list(news)
    output.scheduled_cached_reqs = _columns(list(cached))
    output.num_scheduled_tokens = dict(scheduled)
    output.total_num_scheduled_tokens = sum(scheduled.values())
    output.finished_req_ids = set(finished)
    output.preempted_req_ids = set(preempted)
    return output


def _columns(rows: list[Cached]) -> CachedRequestData:
    columns = CachedRequestData.make_empty()
    for row in rows:
        columns.req_ids.append(row.request_id)
        columns.num_computed_tokens.append(row.computed)
        columns.new_block_ids.append(None if row.blocks is None else (row.blocks,))
        if row.tokens is not None:
            columns.resumed_req_ids.add(row.request_id)
            columns.all_token_ids[row.request_id] = row.tokens
    return columns
