"""vLLM's scheduler, held back where a static-shape device needs it and left alone everywhere else.

Every step narrows what the stock scheduler may see (how many tokens, how many new prompts, and on a device that
cannot mix, prompts or decode rows only), delegates, and restores. Policy, preemption, prefix caching, priorities
and grammars stay vLLM's.

A step the device failed at ends the requests that hold cache with an error, and the prefix cache is dropped with
them, for it may name blocks that were never written; waiting requests stay, and the engine lives on. A step that
meets a device replaced between two requests is scheduled again, its cached prefixes forgotten.

Knows the plan's limits and the device's capabilities. Knows no tensors and no model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import RequestStatus

from neuronserve.neuron_worker.config import NeuronConfig
from neuronserve.neuron_worker.output import FailedStep, ForgottenCache
from neuronserve.speculative.verify import real_drafts

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

PROMPT_STEPS_IN_A_ROW = 1
"""On a device that cannot mix: prompt steps before running requests get a decode step."""


class StepsWithDrafts(RequestSpecDecodeMetrics):
    """A request's own figures. A row of placeholders alone is no step that had drafts."""

    def observe(self, num_draft_tokens: int, num_accepted: int, detailed: bool = False) -> None:
        if num_draft_tokens:
            super().observe(num_draft_tokens, num_accepted, detailed)


class RoomInBlock:
    """`KVCacheManager.allocate_slots`, answered at once where the tokens lie in a block that their request has and do
    not fill it: there is nothing to allocate, and no block that could be cached. vLLM asks for every running request
    in every step, and takes 25 calls of functions to find just this, 15 times in 16 with blocks of 16 tokens. One that
    waits is vLLM's to admit, whatever room it has.

    For a cache that `is_plain`, without drafts, whose tokens may be taken back. It can go when vLLM looks first itself.
    """

    def __init__(self, manager: KVCacheManager, block_size: int) -> None:
        self._allocate = manager.allocate_slots
        self._nothing = manager.empty_kv_cache_blocks
        self._block_size = block_size

    def __call__(self, request: Request, num_new_tokens: int, *args: Any, **more: Any) -> KVCacheBlocks | None:
        used = request.num_computed_tokens % self._block_size
        if used and 0 < num_new_tokens < self._block_size - used and request.status == RequestStatus.RUNNING:
            return self._nothing
        return self._allocate(request, num_new_tokens, *args, **more)

    @staticmethod
    def is_plain(cache: KVCacheConfig, block_size: int) -> bool:
        """All full attention, in blocks that are those of prefixes too: nothing is freed, and none cached in part."""
        specs = [group.kv_cache_spec for group in cache.kv_cache_groups]
        return len(specs) == 1 and type(specs[0]) is FullAttentionSpec and specs[0].block_size == block_size


class NeuronScheduler(Scheduler):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.num_spec_tokens and RoomInBlock.is_plain(self.kv_cache_config, self.block_size):
            manager = self.kv_cache_manager
            manager.allocate_slots = RoomInBlock(manager, self.block_size)  # type: ignore[method-assign]
        config = NeuronConfig.of(self.vllm_config)
        self._capabilities = config.capabilities
        self._is_fused = config.is_fused
        self._prompts_per_step = config.plan.prompts_per_call
        self._prompt_tokens_per_step = config.plan.chunk_tokens or config.plan.max_prefill_tokens
        self._prompt_steps = 0
        if config.plan.chunk_tokens is not None:
            # No prompt may put more than a chunk in a step, whatever budget preempted rows leave behind; nor may vLLM
            # cut a row that it has filled up with placeholders, which it then finds too short.
            threshold = self.scheduler_config.long_prefill_token_threshold or config.plan.chunk_tokens
            if threshold <= self.num_spec_tokens:
                threshold, given = 1 + self.num_spec_tokens, threshold
                logger.warning(
                    "--long-prefill-token-threshold %d holds no token and its drafts: raised to %d", given, threshold
                )
            self.scheduler_config.long_prefill_token_threshold = min(threshold, config.plan.chunk_tokens)

    def add_request(self, request: Request) -> None:
        super().add_request(request)
        if request.spec_decode_metrics is not None:
            request.spec_decode_metrics = StepsWithDrafts.new(self.num_spec_tokens)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        output = self._schedule(throttle_prefills)
        if output.scheduled_spec_decode_tokens and not self._is_fused:
            _tell_placeholders(output)
        return output

    def _schedule(self, throttle_prefills: bool) -> SchedulerOutput:
        decodes = [request for request in self.running if not request.is_prefill_chunk]
        prompts = [request for request in self.running if request.is_prefill_chunk]
        if self._capabilities.mixes_prefill_and_decode:
            return self._schedule_together(decodes, prompts, throttle_prefills)
        return self._schedule_apart(decodes, prompts, throttle_prefills)

    def _schedule_together(self, decodes: list[Request], prompts: list[Request], throttle: bool) -> SchedulerOutput:
        """Every decode row, and prompt tokens up to what a call takes."""
        self.running = decodes + prompts  # the budget must reach every decode row before a chunk takes its rest
        places = max(0, self._prompts_per_step - len(prompts))
        return self._schedule_within(
            self._prompt_tokens_per_step + self._num_tokens(decodes), len(self.running) + places, throttle
        )

    def _schedule_apart(self, decodes: list[Request], prompts: list[Request], throttle: bool) -> SchedulerOutput:
        """Prompts or decode rows, taking turns while there are both."""
        attempt = None
        if self._is_prompts_turn(decodes, prompts):
            attempt = self._schedule_prompts(decodes, prompts, throttle)
            if attempt.total_num_scheduled_tokens:
                self._prompt_steps += 1
                return attempt
        # Nothing fits, perhaps because the cache is full: only decoding on will ever free it.
        self._prompt_steps = 0
        decodes = [request for request in self.running if not request.is_prefill_chunk]
        output = self._schedule_decodes(decodes, throttle)
        if attempt is not None:
            _carry_over(attempt, output)
        return output

    def _is_prompts_turn(self, decodes: list[Request], prompts: list[Request]) -> bool:
        if prompts and self._capabilities.all_live_rows_in_decode:
            return True  # a half-read prompt's row would be lost in a decode that leaves it out
        if decodes and self._prompt_steps >= PROMPT_STEPS_IN_A_ROW:
            return False
        has_room = len(self.running) < self.max_num_active_reqs and self._pause_state == PauseState.UNPAUSED
        return bool(prompts) or (has_room and bool(self.waiting or self.kv_holding_waiting))

    def _schedule_prompts(self, decodes: list[Request], prompts: list[Request], throttle: bool) -> SchedulerOutput:
        free = self.max_num_active_reqs - len(self.running)
        places = min(free, max(0, self._prompts_per_step - len(prompts)))
        with self._hidden(decodes):
            return self._schedule_within(self._prompt_tokens_per_step, len(prompts) + places, throttle)

    def _schedule_decodes(self, decodes: list[Request], throttle: bool) -> SchedulerOutput:
        prompts = [request for request in self.running if request.is_prefill_chunk]
        with self._hidden(prompts):
            return self._schedule_within(self.max_num_scheduled_tokens, len(decodes), throttle)

    def _num_tokens(self, decodes: list[Request]) -> int:
        drafts = sum([len(request.spec_token_ids) for request in decodes]) if self.num_spec_tokens else 0
        return len(decodes) + drafts

    def _schedule_within(self, num_tokens: int, num_active: int, throttle: bool) -> SchedulerOutput:
        """At most so many tokens in the step, and so many requests in `running` after it."""
        tokens, active = self.max_num_scheduled_tokens, self.max_num_active_reqs
        self.max_num_scheduled_tokens = min(tokens, num_tokens)
        self.max_num_active_reqs = min(active, num_active + self.num_waiting_for_streaming_input)
        try:
            return super().schedule(throttle)
        finally:
            self.max_num_scheduled_tokens, self.max_num_active_reqs = tokens, active

    @contextmanager
    def _hidden(self, requests: list[Request]) -> Iterator[None]:
        """These are not running, for the length of one step."""
        hidden = set(requests)
        self.running = [request for request in self.running if request not in hidden]
        known = self.prev_step_scheduled_req_ids & {request.request_id for request in requests}
        try:
            yield
        finally:
            self.running = requests + self.running
            # Else each would come with a full copy of its tokens when it shows again.
            self.prev_step_scheduled_req_ids |= known

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        if isinstance(model_runner_output, ForgottenCache):
            self.reset_prefix_cache(reset_running_requests=True)
        if not isinstance(model_runner_output, FailedStep):
            return super().update_from_output(scheduler_output, model_runner_output)
        holding = [r.request_id for r in self.requests.values() if r.num_computed_tokens > 0]
        failed = self.finish_requests(holding, RequestStatus.FINISHED_ERROR)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.reset_prefix_cache()
        _add_endings(outputs, failed)
        return outputs

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """A row of placeholders alone is no draft; vLLM would count one that had no tokens."""
        if num_draft_tokens == (num_invalid_spec_tokens or {}).get(request_id, 0):
            return spec_decoding_stats
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )


def _tell_placeholders(output: SchedulerOutput) -> None:
    """vLLM fills a joining row up with placeholders, and would count them as drafts that were wrong."""
    drafts = output.scheduled_spec_decode_tokens
    invalid = {id: len(own) - len(real) for id, own in drafts.items() if (real := real_drafts(own)) is not own}
    if invalid:
        output.num_invalid_spec_tokens = invalid


def _carry_over(attempt: SchedulerOutput, output: SchedulerOutput) -> None:
    """What an attempt that scheduled nothing has consumed must still reach the worker."""
    output.finished_req_ids = output.finished_req_ids | attempt.finished_req_ids
    output.preempted_req_ids = (output.preempted_req_ids or set()) | (attempt.preempted_req_ids or set())
    output.kv_cache_block_copies = [*(attempt.kv_cache_block_copies or ()), *(output.kv_cache_block_copies or ())]
    output.new_block_ids_to_zero = [*(attempt.new_block_ids_to_zero or ()), *(output.new_block_ids_to_zero or ())]
    output.free_encoder_mm_hashes = [*attempt.free_encoder_mm_hashes, *output.free_encoder_mm_hashes]


def _add_endings(outputs: dict[int, EngineCoreOutputs], requests: Iterable[Request]) -> None:
    """Tell each client that its request is over."""
    for request in requests:
        ending = EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=[],
            finish_reason=request.get_finished_reason(),
            events=request.take_events(),
            trace_headers=request.trace_headers,
        )
        outputs.setdefault(request.client_index, EngineCoreOutputs()).outputs.append(ending)
