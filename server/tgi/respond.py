"""A parsed request answered with generated text in TGI's form, whole or as a stream."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from . import answers, headers, sse
from .errors import ClientLeft, TgiError, Unexpected
from .generate import Answer, Clock
from .schemas import GenerateRequest
from .service import Recording, TgiService
from .translate import Job

logger = logging.getLogger(__name__)

T = TypeVar("T")


async def whole(
    request: Request, service: TgiService, asked: GenerateRequest, clock: Clock, *, full_text: bool, as_list: bool
) -> Response:
    """One object; a list of one where TGI's first clients look for it."""
    with Recording(service.recorder) as recording:
        job, found = await unless_client_leaves(request, _generate(request, service, asked, clock))
        best = found[0].ending
        recording.success(clock.timings, best.generated_tokens)
    answer = answers.whole(job, found, full_text=_choose(asked, full_text))
    return JSONResponse(
        [answer] if as_list else answer,
        headers=headers.of_answer(
            service.compute_type, asked.inputs, clock.timings, len(job.token_ids), best.generated_tokens
        ),
    )


async def _generate(
    request: Request, service: TgiService, asked: GenerateRequest, clock: Clock
) -> tuple[Job, list[Answer]]:
    with service.admission.admit(1):
        job = await service.prepare(asked.inputs, asked.parameters, clock, streaming=False)
        with service.admission.admit(job.num_answers - 1):
            return job, await service.generator.answers(job, clock, await service.trace(request.headers))


def stream(request: Request, service: TgiService, asked: GenerateRequest, clock: Clock, *, full_text: bool) -> Response:
    """Status 200 whatever happens: an error is the last event."""
    return sse.EventStream(
        _events(request, service, asked, clock, _choose(asked, full_text)),
        headers.of_stream(service.compute_type, len(asked.inputs)),
    )


async def _events(
    request: Request, service: TgiService, asked: GenerateRequest, clock: Clock, full_text: bool
) -> AsyncGenerator[bytes, None]:
    try:
        with Recording(service.recorder) as recording, service.admission.admit(1):
            job = await service.prepare(asked.inputs, asked.parameters, clock, streaming=True)
            trace = await service.trace(request.headers)
            index = 0
            async with aclosing(service.generator.steps(job, clock, trace)) as steps:
                async for step in steps:
                    index += 1
                    if step.ending is not None:
                        recording.success(clock.timings, step.ending.generated_tokens)
                    yield sse.event(answers.event(job, index, step, full_text=full_text))
    except TgiError as error:
        yield sse.event(error.body)
    except Exception as error:  # a stream has no other way to say that it went wrong
        logger.exception("an answer could not be made")
        yield sse.event(Unexpected(error).body)


def _choose(asked: GenerateRequest, default: bool) -> bool:
    wanted = asked.parameters.return_full_text
    return default if wanted is None else wanted


async def unless_client_leaves(request: Request, work: Awaitable[T]) -> T:
    """The work's result; it is cancelled, and has ended, when the client leaves first."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.create_task(sse.client_left(request.receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        await sse.ended(leaving)
        await sse.ended(task)
