"""A `Job` through the engine: its tokens one by one, or a whole `Answer`.

Whoever stops reading closes the generator, and closing it aborts the request in the engine: a client that left, a stop
sequence and an error leave by the same door. Knows neither JSON nor HTTP.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.exceptions import GenerationError, VLLMError
from vllm.inputs import tokens_input

from . import errors
from .following import Ending, Following, Step
from .metrics import Timings
from .schemas import PrefillToken, Token
from .tokens import Vocabulary
from .translate import Job, Offers, sampling_params, seed_of

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient
    from vllm.outputs import RequestOutput


REQUEST_PREFIX = "tgi-"
"""Of the ids that the engine knows these routes' requests by."""


@dataclass
class Clock:
    """When a request reached which place, in monotonic seconds. Filled while it runs."""

    started: float = field(default_factory=time.monotonic)
    submitted: float | None = None
    queue: float = 0.0  # seconds in the engine's queue, as the engine tells
    ended: float | None = None

    def submit(self) -> None:
        self.submitted = time.monotonic()

    def note(self, output: RequestOutput) -> None:
        if (stats := output.metrics) is not None and stats.scheduled_ts > 0:
            self.queue = max(0.0, stats.scheduled_ts - stats.queued_ts)

    @property
    def timings(self) -> Timings:
        end = time.monotonic() if self.ended is None else self.ended
        submitted = end if self.submitted is None else self.submitted
        queue = min(self.queue, end - submitted)
        return Timings(end - self.started, submitted - self.started, queue, end - submitted - queue)


@dataclass(frozen=True)
class Answer:
    """One whole answer."""

    ending: Ending
    tokens: list[Token]
    top_tokens: list[list[Token]]
    prefill: list[PrefillToken]

    @property
    def mean_logprob(self) -> float:
        return sum(token.logprob for token in self.tokens) / len(self.tokens)


class Generator:
    """Of one API process."""

    def __init__(self, engine: EngineClient, vocabulary: Vocabulary, offers: Offers) -> None:
        self._engine = engine
        self._vocabulary = vocabulary
        self._offers = offers

    async def steps(
        self, job: Job, clock: Clock, trace: Mapping[str, str] | None, prefill: list[PrefillToken] | None = None
    ) -> AsyncGenerator[Step, None]:
        """One answer's tokens. The prompt's go into `prefill`, where the job asks for them."""
        seed = seed_of(job, self._offers)
        following = Following(job, seed, self._vocabulary)
        ended = False
        async with aclosing(self._outputs(job, seed, trace)) as outputs:
            async for output in outputs:
                clock.note(output)
                if prefill is not None and output.prompt_logprobs:
                    prefill += following.prefill(output.prompt_logprobs)
                for step in following.read(output.outputs[0]):
                    if step.ending is not None:
                        ended, clock.ended = True, time.monotonic()
                    yield step
                if ended and not output.finished:
                    return  # which tells the engine to stop
        if not ended:
            raise errors.Incomplete

    async def _outputs(
        self, job: Job, seed: int | None, trace: Mapping[str, str] | None
    ) -> AsyncGenerator[RequestOutput, None]:
        """What the engine says, its errors in this protocol's words."""
        try:
            params = sampling_params(job, seed, self._offers)
            prompt = tokens_input(list(job.token_ids), prompt=job.inputs)
            outputs = self._engine.generate(prompt, params, REQUEST_PREFIX + uuid.uuid4().hex, trace_headers=trace)
            async with aclosing(outputs):
                async for output in outputs:
                    if output.outputs[0].finish_reason == "error":
                        raise GenerationError
                    yield output
        except (VLLMError, ValueError) as error:
            raise errors.from_engine(error) from error

    async def answers(self, job: Job, clock: Clock, trace: Mapping[str, str] | None) -> list[Answer]:
        """All that `best_of` asks for, computed at once, the likeliest first."""
        if job.num_answers == 1:
            return [await self._answer(job, clock, trace)]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(job, clock, trace)) for _ in range(job.num_answers)]
        except ExceptionGroup as several:
            raise several.exceptions[0] from None
        return sorted((task.result() for task in tasks), key=lambda answer: -answer.mean_logprob)

    async def _answer(self, job: Job, clock: Clock, trace: Mapping[str, str] | None) -> Answer:
        steps: list[Step] = []
        prefill: list[PrefillToken] = []
        async with aclosing(self.steps(job, clock, trace, prefill)) as coming:
            async for step in coming:
                steps.append(step)
        ending = steps[-1].ending
        assert ending is not None  # `steps` ends with one, or raises
        return Answer(ending, [step.token for step in steps], [step.top_tokens for step in steps], prefill)
