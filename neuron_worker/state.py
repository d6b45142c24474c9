"""The requests of a running batch: what vLLM's scheduler says in, the rows of a step out.

A request lives here from the step that first schedules it until vLLM lists it as finished; while it runs it
has a *place*, a line of the token and block arrays. `_vacate` is the one way a place is given back, whether the
request finished, was aborted, failed or was preempted. A preempted request keeps its record and takes a new
place when it resumes.

Knows vLLM's `SchedulerOutput` and the packer's `Row`. Knows no text, no shapes, no device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from neuronserve.bucketing.row import Row
from neuronserve.neuron_worker.device.base import Int32, Want
from neuronserve.speculative.proposer import NOTHING, Proposal
from neuronserve.speculative.verify import real_drafts

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.outputs import LogprobsTensors


NO_PLACE = -1
NO_BLOCKS: Int32 = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a request's rows end: decided once, when it joins, from its own parameters alone."""

    want: Want
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None

    @property
    def draws(self) -> bool:
        """Whether the device needs a random number for each token."""
        return self.want == Want.TOKEN and self.temperature > 0


@dataclass(slots=True, eq=False)
class LiveRequest:
    """What the worker knows of one request. Identity is the object: ids are vLLM's and may come again."""

    id: str
    params: SamplingParams
    prompt: list[int]
    ending: Ending
    output: list[int] = field(default_factory=list)
    place: int = NO_PLACE
    blocks: Int32 = field(default_factory=lambda: NO_BLOCKS)  # a view, made anew whenever there are more
    num_computed: int = 0
    scores_due: bool = False  # prompt log-probabilities asked for and not yet delivered
    num_prompt_logprobs: int = 0  # alternatives beside the prompt's own token
    prompt_scores: LogprobsTensors | None = None  # of the chunks so far
    proposed: Proposal = NOTHING  # for what follows its tokens

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) + len(self.output)


class ScheduledRow(NamedTuple):
    """A row and whose it is. `ends`: the row reaches its request's last known token, so new ones follow: one, and one
    more for each of the `drafts` that turns out right."""

    request: LiveRequest
    row: Row
    ends: bool
    drafts: Sequence[int] = ()


class RequestState:
    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        vocab_size: int,
        decide: Callable[[SamplingParams], Ending],
        draw: Callable[[Ending, int], float],
        num_ahead: int = 0,
        is_fused: bool = False,
    ) -> None:
        """`num_ahead`: positions after a row that a draft on the device may fill. `is_fused`: the device's own call
        fills them, where the scheduler has placeholders."""
        self._max_model_len = max_model_len
        max_blocks = -(-max_model_len // block_size)
        self._tokens: Int32 = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._blocks: Int32 = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._free_places = list(range(max_num_seqs))[::-1]
        self._requests: dict[str, LiveRequest] = {}
        self._vocab_size = vocab_size
        self._decide = decide
        self._draw = draw
        self._num_ahead = num_ahead
        self._is_fused = is_fused

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def num_requests(self) -> int:
        return len(self._requests)

    @property
    def num_free_places(self) -> int:
        return len(self._free_places)

    def apply(self, scheduled: SchedulerOutput) -> list[ScheduledRow]:
        """Bring the requests up to date and give the step's rows, decode rows first."""
        # Finished requests first: this very step may give their blocks, places, even ids to others.
        for request_id in scheduled.finished_req_ids:
            self._leave(request_id)
        for request_id in scheduled.preempted_req_ids or ():
            if (request := self._requests.get(request_id)) is not None:
                self._vacate(request)
        for new in scheduled.scheduled_new_reqs:
            self._join(new)
        self._advance(scheduled.scheduled_cached_reqs)
        return self._rows(scheduled.num_scheduled_tokens, scheduled.scheduled_spec_decode_tokens)

    def append(self, request: LiveRequest, token: int) -> None:
        """The token that follows all known ones."""
        self._tokens[request.place, request.num_tokens] = token
        request.output.append(token)

    def known_tokens(self, request: LiveRequest) -> Int32:
        """Prompt and output of a running request; a view, good until the next step."""
        return self._tokens[request.place, : request.num_tokens]

    def _join(self, new: NewRequestData) -> None:
        if new.prompt_token_ids is None or new.sampling_params is None:
            raise ValueError(f"request {new.req_id} has no prompt tokens or no sampling parameters")
        self._leave(new.req_id)  # a session that goes on with more input comes as new again
        asked = new.sampling_params.prompt_logprobs
        request = LiveRequest(
            id=new.req_id,
            params=new.sampling_params,
            prompt=new.prompt_token_ids,
            ending=self._decide(new.sampling_params),
            num_computed=new.num_computed_tokens,
            scores_due=asked is not None,
            num_prompt_logprobs=self._vocab_size if asked == -1 else asked or 0,
        )
        self._requests[new.req_id] = request
        self._take_place(request, request.prompt, new.block_ids[0])

    def _advance(self, cached: CachedRequestData) -> None:
        columns = zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True)
        for request_id, block_ids, num_computed in columns:
            request = self._requests[request_id]
            if request_id in cached.resumed_req_ids:
                self._resume(request, cached.all_token_ids.get(request_id), block_ids)
            elif block_ids is not None:
                self._add_blocks(request, block_ids[0])
            request.num_computed = num_computed

    def _resume(self, request: LiveRequest, tokens: list[int] | None, block_ids: tuple[list[int], ...] | None) -> None:
        if block_ids is None:
            raise ValueError(f"request {request.id} resumes without blocks")
        if tokens is None:
            tokens = request.prompt + request.output
        request.output[:] = tokens[len(request.prompt) :]  # in place: samplers hold on to this list
        self._vacate(request)
        self._take_place(request, tokens, block_ids[0])

    def _take_place(self, request: LiveRequest, tokens: list[int], block_ids: list[int]) -> None:
        request.place = self._free_places.pop()
        self._tokens[request.place, : len(tokens)] = tokens
        self._add_blocks(request, block_ids)

    def _add_blocks(self, request: LiveRequest, block_ids: list[int]) -> None:
        start, end = len(request.blocks), len(request.blocks) + len(block_ids)
        self._blocks[request.place, start:end] = block_ids
        request.blocks = self._blocks[request.place, :end]

    def _leave(self, request_id: str) -> None:
        if (request := self._requests.pop(request_id, None)) is not None:
            self._vacate(request)

    def _vacate(self, request: LiveRequest) -> None:
        if request.place != NO_PLACE:
            self._free_places.append(request.place)
            request.place = NO_PLACE
            request.blocks = NO_BLOCKS

    def _rows(self, num_scheduled: dict[str, int], drafts: dict[str, list[int]]) -> list[ScheduledRow]:
        decodes: list[ScheduledRow] = []
        prefills: list[ScheduledRow] = []
        for request_id, count in num_scheduled.items():
            request = self._requests[request_id]
            scheduled = self._row(request, count, drafts.get(request_id, ()))
            (decodes if scheduled.row.is_decode else prefills).append(scheduled)
        return decodes + prefills

    def _row(self, request: LiveRequest, count: int, scheduled_drafts: Sequence[int]) -> ScheduledRow:
        """A decode row holds exactly the last known token, after the prompt, and its drafts; everything else is a
        prompt's chunk. Of drafts in `count` placeholders are left out: they could not be right."""
        start, ending = request.num_computed, request.ending
        count -= len(scheduled_drafts)
        ends = start + count >= request.num_tokens
        is_decode = ends and count == 1 and start >= len(request.prompt)  # a resumed request may bring more
        drafts = real_drafts(scheduled_drafts) if is_decode and scheduled_drafts else ()
        if drafts:
            self._tokens[request.place, start + count : start + count + len(drafts)] = drafts
        scored = request.scores_due and not is_decode
        end = start + count + len(drafts)
        row = Row(
            tokens=self._tokens[request.place, start:end],
            position=start,
            blocks=request.blocks,
            is_decode=is_decode,
            want=ending.want if ends else Want.NOTHING,
            temperature=ending.temperature,
            top_k=ending.top_k,
            top_p=ending.top_p,
            min_p=ending.min_p,
            uniforms=self._uniforms(request, 1 + len(drafts)) if ends and ending.draws else (),
            targets=self._targets(request, start, count) if scored else None,
            prompt_logprobs=request.num_prompt_logprobs if scored else 0,
            lookahead=min(self._num_ahead, self.max_model_len - end) if ends else 0,
            fused_drafts=len(scheduled_drafts) if is_decode and self._is_fused else 0,
        )
        return ScheduledRow(request, row, ends, drafts)

    def _uniforms(self, request: LiveRequest, count: int) -> tuple[float, ...]:
        first = len(request.output)
        return tuple([self._draw(request.ending, first + index) for index in range(count)])

    def _targets(self, request: LiveRequest, start: int, count: int) -> Int32:
        """The token after each of the chunk's, as long as it is the prompt's; -1: not scored."""
        targets = self._tokens[request.place, start + 1 : start + count + 1].copy()
        targets[max(0, len(request.prompt) - 1 - start) :] = -1
        return targets
