"""One engine step: scheduled rows in, accepted tokens out.

    apply -> split -> (choose -> pack -> run) per call -> sample, verify -> report ... look ahead, draft

Most steps are one device call. Where no shape holds the step, or the device does not mix prefill and decode,
it becomes several. With a grammar in the batch the step pauses before sampling, because vLLM computes the
grammar's mask while the device runs. A draft on the device looks ahead when vLLM asks for drafts: the step's tokens are
on their way to the clients by then.

Knows rows and shapes. Knows nothing of text, tokenizers or HTTP, nor why the plan has the shapes it has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from neuronserve.bucketing.errors import BucketError
from neuronserve.bucketing.pack import RowOutput, StepPacker, unpack
from neuronserve.bucketing.split import Part, split
from neuronserve.bucketing.waste import PaddingCounters
from neuronserve.neuron_worker.device.base import Device
from neuronserve.neuron_worker.device.errors import DeviceError, DeviceLost
from neuronserve.neuron_worker.look_ahead import Call, LookAhead
from neuronserve.neuron_worker.metrics import Counters
from neuronserve.neuron_worker.output import FailedStep, ForgottenCache, add_prompt_scores, report, take_prompt_scores
from neuronserve.neuron_worker.rounds import HostRow, HostTokens, Masks, sample_in_rounds
from neuronserve.speculative.verify import accept, real_drafts

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, LogprobsTensors, ModelRunnerOutput

    from neuronserve.bucketing.plan import Plan
    from neuronserve.bucketing.shape import StepDemand
    from neuronserve.neuron_worker.drafter import Drafted, Drafter
    from neuronserve.neuron_worker.revival import Revival
    from neuronserve.neuron_worker.sampling import HostSampler
    from neuronserve.neuron_worker.state import LiveRequest, RequestState, ScheduledRow

logger = logging.getLogger(__name__)

Given = TypeVar("Given")
Answer = TypeVar("Answer")


@dataclass
class ComputedStep:
    """What the device gave, until it is sampled and reported. One of the first three lists per scheduled row."""

    scheduled: SchedulerOutput
    on_device: list[tuple[LiveRequest, list[int]]] = field(default_factory=list)  # sampled there, accepted
    for_host: list[HostRow] = field(default_factory=list)
    unfinished: list[LiveRequest] = field(default_factory=list)  # a chunk that is not the prompt's last
    prompt_logprobs: dict[str, LogprobsTensors | None] = field(default_factory=dict)
    num_tokens: dict[str, int] = field(default_factory=dict)  # that each request got so far
    call: Call | None = None  # the latest
    num_calls: int = 0
    drafted: dict[str, Sequence[int]] = field(default_factory=dict)  # by a draft on the device


class Runner:
    def __init__(
        self,
        *,
        device: Device,
        plan: Plan,
        packer: StepPacker,
        state: RequestState,
        host_sampler: HostSampler,
        revival: Revival,
        complain: Callable[[str], None],
        drafter: Drafter | None = None,
        look_ahead: LookAhead | None = None,
    ) -> None:
        self.device = device
        self.plan = plan
        self.packer = packer
        self.state = state
        self.host_sampler = host_sampler
        self.counters = Counters()
        self.padding = PaddingCounters()
        self._revival = revival
        self._complain = complain
        self._drafter = drafter
        self._look_ahead = look_ahead
        self._unread: ComputedStep | None = None  # reported, and the draft on the device has not seen it yet
        self._lost: str | None = None  # why, until the device is revived
        self._cache_is_gone = False  # and the scheduler does not know yet
        self._paused: ComputedStep | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request's cache would be lost with the device."""
        return self.state.num_requests == 0

    def revive(self, reason: str) -> None:
        """Replace a device that was lost between two steps."""
        self._cache_is_gone = self._cache_is_gone or self._lost is None  # else the failed step has told of it
        self._lost = self._lost or reason
        self.device, self._lost = self._revival.revive(reason), None

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """None: call `sample` for the step's result."""
        began = time.perf_counter()
        rows = self.state.apply(scheduled)
        if not rows:
            return EMPTY_MODEL_RUNNER_OUTPUT
        if self._cache_is_gone:
            self._cache_is_gone = False
            return ForgottenCache.of(list(scheduled.num_scheduled_tokens))
        whole = Part.of([scheduled_row.row for scheduled_row in rows])
        self.counters.step_applied(
            began, whole.demand.decode_rows, num_rows=len(rows), num_joined=len(scheduled.scheduled_new_reqs)
        )
        try:
            step = self._compute(scheduled, rows, whole)
        except (DeviceError, BucketError) as error:
            return self._fail(scheduled, error)
        if scheduled.has_structured_output_requests:
            self._paused = step
            self._count(rows, whole.demand, began)
            return None
        output = self._finish(step, None)
        self._count(rows, whole.demand, began)
        return output

    def sample(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        """Finish the step that `execute` paused."""
        began = time.perf_counter()
        step, self._paused = self._paused, None
        assert step is not None, "execute did not pause"
        output = self._finish(step, grammar)
        self.counters.step_seconds += time.perf_counter() - began
        return output

    def take_drafts(self) -> DraftTokenIds | None:
        """For what follows the step that has just been reported."""
        if self._drafter is None:
            return None
        began = time.perf_counter()
        drafts = self._drafter.take(self._look_after_step())
        self.counters.step_seconds += time.perf_counter() - began
        return drafts

    def _look_after_step(self) -> Drafted | None:
        """A device that fails here has failed at no step: its tokens are the clients', and the requests go on."""
        step, self._unread = self._unread, None
        if step is None or self._look_ahead is None or self._drafter is None:
            return None
        try:
            num_asked, seconds = self._look(step, drafts=self._drafter.asks_device())
            if self._drafter.pace is not None:
                self._drafter.pace.asked(num_asked, seconds)
        except DeviceLost as lost:
            self._drafter.forget()
            self._complain(f"the device was lost while it drafted: {lost}")
            self.revive(str(lost))
        except DeviceError as error:
            self._drafter.forget()
            self._complain(f"nothing is drafted for the next step: {error}")
        return step.drafted

    def _look(self, step: ComputedStep, *, drafts: bool) -> tuple[int, float]:
        """Let the draft on the device read the step's latest call: for how many requests it drafted, and how long."""
        look_ahead, call = self._look_ahead, step.call
        if look_ahead is None or call is None or not look_ahead.has_to_read(call):
            return 0, 0.0
        began = time.perf_counter()
        said = _on_device(lambda call: look_ahead(self.device, call, step.num_tokens, drafts=drafts), call)
        step.drafted.update(said)
        seconds = time.perf_counter() - began
        self.counters.draft_calls += 1
        self.counters.draft_seconds += seconds
        self.counters.device_seconds += seconds
        return len(said), seconds

    def _compute(self, scheduled: SchedulerOutput, rows: Sequence[ScheduledRow], whole: Part) -> ComputedStep:
        if self._lost is not None:
            self.device, self._lost = self._revival.revive(self._lost), None
        if scheduled.kv_cache_block_copies:
            pairs = [(c.src_block_id, c.dst_block_id) for c in scheduled.kv_cache_block_copies]
            _on_device(self.device.copy_blocks, pairs)
        step, self._unread = ComputedStep(scheduled), None
        remaining = iter(rows)  # calls keep the order of the rows
        parts = split(whole, self.plan)
        for number, part in enumerate(parts, start=1):
            owners = list(islice(remaining, len(part.rows)))
            is_last = number == len(parts)
            for owner, output in zip(owners, self._call(step, owners, part), strict=True):
                self._collect(step, owner, output, is_last=is_last)
            if not is_last:
                self._look(step, drafts=True)  # before the next call takes its arrays
        self._revival.worked()
        return step

    def _call(self, step: ComputedStep, owners: Sequence[ScheduledRow], part: Part) -> list[RowOutput]:
        shape = self.plan.choose(part.demand)
        batch = self.packer.pack(part.rows, shape)
        output = _on_device(self.device.run, batch)
        step.call, step.num_calls = Call(owners, batch, output.device_seconds), step.num_calls + 1
        self.padding.add(shape, part.demand)
        self.counters.device_calls += 1
        self.counters.device_seconds += output.device_seconds
        return unpack(output, part.rows, shape)

    def _collect(self, step: ComputedStep, owner: ScheduledRow, output: RowOutput, *, is_last: bool) -> None:
        request = owner.request
        if output.prompt_scores is not None:
            add_prompt_scores(request, owner.row.position, output.prompt_scores)
        if not owner.ends:
            step.unfinished.append(request)
        elif output.logits is not None:
            # The device's arrays are gone with its next call, which comes after this step is sampled or before.
            logits = output.logits if is_last else output.logits.copy()
            step.for_host.append(HostRow(request, logits, owner.drafts))
        else:
            tokens = output.tokens
            if owner.drafts:
                tokens = accept(owner.drafts, tokens)
            elif owner.row.fused_drafts:
                tokens = list(real_drafts(tokens))  # the device has accepted
            for token in tokens:
                self.state.append(request, token)
            step.on_device.append((request, tokens))
            step.num_tokens[request.id] = len(tokens)
        if owner.ends and request.scores_due:
            step.prompt_logprobs[request.id] = take_prompt_scores(request)

    def _finish(self, step: ComputedStep, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        self.counters.step_computed()
        began, sampled = time.perf_counter(), None
        if step.for_host:
            drafts = step.scheduled.scheduled_spec_decode_tokens
            sampled = sample_in_rounds(step.for_host, self.host_sampler, self.state.append, Masks(grammar, drafts))
        if self._drafter is not None:
            self._follow_up(self._drafter, step, sampled, time.perf_counter() - began if step.for_host else 0.0)
        self.counters.rows_sampled_on_host += len(step.for_host)
        self.counters.rows_sampled_on_device += len(step.on_device)
        output = report(sampled, step.on_device, step.unfinished, step.prompt_logprobs)
        self.counters.step_ended()
        return output

    def _follow_up(self, drafter: Drafter, step: ComputedStep, sampled: HostTokens | None, host_seconds: float) -> None:
        on_host = list(zip(sampled.requests, sampled.tokens, strict=True)) if sampled else []
        step.num_tokens.update((request.id, len(tokens)) for request, tokens in on_host)
        drafter.requests = [request for request, _ in (*step.on_device, *on_host)]
        self._unread = step
        if drafter.pace is not None and step.call is not None and step.num_calls == 1:
            drafter.pace.saw(step.call, step.num_tokens, host_seconds)
        kept = self.counters.accepted_drafts
        for count in step.num_tokens.values():
            if count > 1:
                kept[count - 1] = kept.get(count - 1, 0) + 1

    def _fail(self, scheduled: SchedulerOutput, error: Exception) -> FailedStep:
        self.counters.failed_steps += 1
        self.counters.step_ended(failed=True)
        if isinstance(error, DeviceLost):
            self._lost = str(error)
        self._complain(f"a step of {len(scheduled.num_scheduled_tokens)} requests failed: {error}")
        return FailedStep.of(list(scheduled.num_scheduled_tokens), str(error))

    def _count(self, rows: Sequence[ScheduledRow], demand: StepDemand, began: float) -> None:
        counters = self.counters
        counters.steps += 1
        counters.decode_tokens += demand.decode_rows
        counters.prompt_tokens += demand.prefill_tokens
        if self._drafter is not None:
            counters.drafted_tokens += sum([len(row.drafts) + row.row.fused_drafts for row in rows])
        counters.step_seconds += time.perf_counter() - began


def _on_device(verb: Callable[[Given], Answer], given: Given) -> Answer:
    """A backend's defect in this process ends a step, as one in another process does, and not the engine. What the
    device holds after it is anybody's guess: it is loaded anew."""
    try:
        return verb(given)
    except DeviceError:
        raise
    except (Exception, SystemExit) as error:
        logger.exception("a defect of the device's backend")  # the log has where
        raise DeviceLost(f"the device's backend failed: {type(error).__name__}: {error}") from error
