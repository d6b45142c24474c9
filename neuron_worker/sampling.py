"""Where and how a row's next token is drawn.

A request is decided once, when it joins, from its own parameters alone: what the device can honour is sampled
there and only the token id crosses; everything else gets its logits on the host and goes through vLLM's own
sampler (`row_sampler.py`: with our draw for its last stage, and with TGI's rules for TGI's rows). So a row never
depends on its neighbours.

Knows vLLM's sampling parameters and sampler. Knows no scheduler, no blocks, no text.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from vllm.config import set_current_vllm_config
from vllm.sampling_params import SamplingType
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors, build_logitsprocs
from vllm.v1.structured_output.utils import apply_grammar_bitmask
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

from neuronserve.neuron_worker.device.base import Capabilities, Float32, Want
from neuronserve.neuron_worker.drawing import Draws
from neuronserve.neuron_worker.parameters import NEED_LOGITS, asked
from neuronserve.neuron_worker.row_sampler import RowSampler, TgiRow
from neuronserve.neuron_worker.state import Ending, LiveRequest
from neuronserve.neuron_worker.tgi_rules import TgiRules

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import GrammarOutput
    from vllm.v1.outputs import LogprobsLists

_WITHOUT_DRAFTS = SchedulerOutput.make_empty()


class Decider:
    """Device or host, for each request."""

    def __init__(self, capabilities: Capabilities, vocab_size: int, *, always_host: bool = False) -> None:
        self._on_device = "tokens" in capabilities.outputs and not always_host
        self._max_top_k = vocab_size if capabilities.max_top_k is None else capabilities.max_top_k
        self._vocab_size = vocab_size

    def __call__(self, params: SamplingParams) -> Ending:
        top_k = params.top_k if 0 < params.top_k < self._vocab_size else 0
        if not self._on_device or top_k > self._max_top_k or _needs_logits(params):
            return Ending(Want.LOGITS, seed=params.seed)
        if params.sampling_type == SamplingType.GREEDY:
            return Ending(Want.TOKEN)
        return Ending(Want.TOKEN, params.temperature, top_k, params.top_p, params.min_p, params.seed)


def _needs_logits(params: SamplingParams) -> bool:
    rules = TgiRules.of(params)
    return bool(asked(params, NEED_LOGITS)) or (rules is not None and bool(rules.asked))


class HostSample(NamedTuple):
    """Requests in the sampler's order, and what it drew for each."""

    requests: list[LiveRequest]
    tokens: list[int]
    logprobs: LogprobsLists | None


class HostSampler:
    """vLLM's sampler over the logits of the rows that need it, and only of those."""

    def __init__(self, vllm_config: VllmConfig, vocab_size: int, draws: Draws) -> None:
        model, self._cpu = vllm_config.model_config, torch.device("cpu")
        with set_current_vllm_config(vllm_config):
            self._processors = build_logitsprocs(
                # Of a configuration with drafts vLLM would drop most of them; ours sees one token after the other.
                vllm_config if vllm_config.speculative_config is None else _undrafted(vllm_config),
                self._cpu,
                is_pin_memory=False,
                is_pooling_model=False,
                custom_logitsprocs=tuple(model.logits_processors or ()),
            )
            self._sampler = RowSampler(model.logprobs_mode, has_custom_processors=self.has_custom_processors)
            self._batch = self._make_batch(vllm_config, vocab_size, self._processors)
        self._draws = draws
        self._members: dict[str, LiveRequest] = {}

    @property
    def has_custom_processors(self) -> bool:
        """Processors of the user's may touch any row, so then every row needs its logits."""
        return any(type(processor) not in BUILTIN_LOGITS_PROCESSORS for processor in self._processors.all)

    def warm_up(self) -> None:
        """vLLM traces how it ranks a token when it first does so; better now than in somebody's request."""
        self._sampler.gather_logprobs(torch.zeros(2, self._batch.vocab_size), 1, torch.zeros(2, dtype=torch.int64))

    def _make_batch(self, vllm_config: VllmConfig, vocab_size: int, processors: LogitsProcessors) -> InputBatch:
        """Used for its sampling half only; its block table is as small as it can be."""
        return InputBatch(
            max_num_reqs=vllm_config.scheduler_config.max_num_seqs,
            max_model_len=vllm_config.model_config.max_model_len,
            max_num_batched_tokens=1,
            device=self._cpu,
            vocab_size=vocab_size,
            block_sizes=[vllm_config.cache_config.block_size],
            max_num_blocks_per_req=[1],
            logitsprocs=processors,
            logitsprocs_need_output_token_ids=self.has_custom_processors,
            reasoning_config=vllm_config.reasoning_config,
        )

    def sample(
        self,
        requests: Sequence[LiveRequest],
        logits: Sequence[Float32],
        grammar: GrammarOutput | None,
    ) -> HostSample:
        """`logits[i]`, [vocabulary], belongs to `requests[i]`; both are left as they are. A grammar's mask has one row
        per request."""
        self._arrange(requests)
        of_id = {request.id: row for request, row in zip(requests, logits, strict=True)}
        table = torch.from_numpy(np.stack([of_id[id] for id in self._batch.req_ids]))  # [rows, vocabulary], a copy
        if grammar is not None:
            apply_grammar_bitmask(_WITHOUT_DRAFTS, grammar, self._batch, table)
        order = [self._members[id] for id in self._batch.req_ids]
        self._sampler.arrange([self._uniform(request) for request in order], _tgi_rows(order))
        drawn = self._sampler(table, self._batch.sampling_metadata)
        logprobs = None if drawn.logprobs_tensors is None else drawn.logprobs_tensors.tolists()
        return HostSample(order, drawn.sampled_token_ids[:, 0].tolist(), logprobs)

    def _arrange(self, requests: Sequence[LiveRequest]) -> None:
        """Make the batch hold exactly these requests; those that stay keep what processors know of them."""
        wanted = {request.id: request for request in requests}
        for id in [id for id, member in self._members.items() if wanted.get(id) is not member]:
            self._batch.remove_request(id)
            del self._members[id]
        for request in requests:
            if request.id not in self._members:
                self._batch.add_request(_as_vllm_knows_it(request))
                self._members[request.id] = request
        self._batch.condense()
        self._batch.refresh_metadata()  # type: ignore[no-untyped-call]

    def _uniform(self, request: LiveRequest) -> float | None:
        if request.params.sampling_type == SamplingType.GREEDY:
            return None
        return self._draws(request.ending, len(request.output))


def _undrafted(vllm_config: VllmConfig) -> VllmConfig:
    plain = copy.copy(vllm_config)
    plain.speculative_config = None
    return plain


def _tgi_rows(requests: Sequence[LiveRequest]) -> dict[int, TgiRow]:
    rules = ((index, request, TgiRules.of(request.params)) for index, request in enumerate(requests))
    return {index: TgiRow(own, request) for index, request, own in rules if own is not None}


def _as_vllm_knows_it(request: LiveRequest) -> CachedRequestState:
    return CachedRequestState(
        req_id=request.id,
        prompt_token_ids=request.prompt,
        mm_features=[],
        sampling_params=request.params,
        generator=None,  # random numbers are ours
        block_ids=([],),
        num_computed_tokens=request.num_computed,
        output_token_ids=request.output,  # the list itself: processors see it grow
    )
