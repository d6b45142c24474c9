"""/vertex: Vertex AI's envelope around several requests, each a text or a chat. All sample, and all run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from .errors import Incomplete, TgiError
from .generate import Answer, Clock
from .schemas import ChatRequest, GenerateParameters, GenerateRequest, VertexRequest, VertexResponse
from .service import Recording, TgiService
from .tokenize import templated


class EmptyInstances(TgiError):
    status = 422
    error_type = "Input validation error"

    def __init__(self) -> None:
        super().__init__("Input validation error")


async def predict(service: TgiService, asked: VertexRequest, trace: Mapping[str, str] | None) -> VertexResponse:
    if not asked.instances:
        raise EmptyInstances
    tasks: list[asyncio.Task[str]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for instance in asked.instances:
                tasks.append(group.create_task(_one(service, instance, trace, tasks)))
    except ExceptionGroup as several:
        raise _meaning(several) from None
    return VertexResponse(predictions=[task.result() for task in tasks])


def _meaning(several: ExceptionGroup[Exception]) -> Exception:
    """A mistake of ours, else what is wrong with the request. TGI itself says `Incomplete generation` of everything."""
    mistakes = [error for error in several.exceptions if not isinstance(error, TgiError)]
    of_the_request = [error for error in several.exceptions if isinstance(error, TgiError) and error.status < 500]
    return next(iter((*mistakes, *of_the_request)), Incomplete())


async def _one(
    service: TgiService,
    instance: GenerateRequest | ChatRequest,
    trace: Mapping[str, str] | None,
    all_of_them: Sequence[asyncio.Task[str]],
) -> str:
    clock = Clock()
    with Recording(service.recorder) as recording, service.admission.admit(1):
        try:
            answer = await _answer(service, instance, clock, trace)
        except asyncio.CancelledError:
            if any(map(_has_failed, all_of_them)):
                recording.give_up()
            raise
        recording.success(clock.timings, answer.ending.generated_tokens)
    return answer.ending.generated_text


def _has_failed(task: asyncio.Task[str]) -> bool:
    return task.done() and not task.cancelled() and task.exception() is not None


async def _answer(
    service: TgiService, instance: GenerateRequest | ChatRequest, clock: Clock, trace: Mapping[str, str] | None
) -> Answer:
    inputs, parameters = await _meant(service, instance)
    is_text = isinstance(instance, GenerateRequest)
    job = await service.prepare(inputs, parameters, clock, streaming=False, add_special_tokens=is_text)
    (answer,) = await service.generator.answers(job, clock, trace)
    return answer


async def _meant(service: TgiService, instance: GenerateRequest | ChatRequest) -> tuple[str, GenerateParameters]:
    if isinstance(instance, ChatRequest):
        text = await templated(service, instance)
        limit = instance.max_completion_tokens if instance.max_tokens is None else instance.max_tokens
        return text, GenerateParameters(do_sample=True, max_new_tokens=limit, seed=instance.seed)
    given = instance.parameters
    return instance.inputs, GenerateParameters(do_sample=True, max_new_tokens=given.max_new_tokens, seed=given.seed)
