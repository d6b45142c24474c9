"""/vertex: Vertex AI's envelope around several requests, each a text or a chat. All sample, and all run at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from .errors import Incomplete, TgiError
from .generate import Clock
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
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(_one(service, instance, trace)) for instance in asked.instances]
    except ExceptionGroup as several:
        known, unknown = several.split(TgiError)
        if known is None or unknown is not None:
            raise
        raise _meaning(known) from None
    return VertexResponse(predictions=[task.result() for task in tasks])


def _meaning(several: ExceptionGroup[TgiError]) -> TgiError:
    """What is wrong with the request, where that is it. TGI itself says `Incomplete generation` of everything."""
    of_the_request = [error for error in several.exceptions if isinstance(error, TgiError) and error.status < 500]
    return of_the_request[0] if of_the_request else Incomplete()


async def _one(service: TgiService, instance: GenerateRequest | ChatRequest, trace: Mapping[str, str] | None) -> str:
    clock = Clock()
    with Recording(service.recorder) as recording, service.admission.admit(1):
        inputs, parameters = await _meant(service, instance)
        is_text = isinstance(instance, GenerateRequest)
        job = await service.prepare(inputs, parameters, clock, streaming=False, add_special_tokens=is_text)
        (answer,) = await service.generator.answers(job, clock, trace)
        recording.success(clock.timings, answer.ending.generated_tokens)
    return answer.ending.generated_text


async def _meant(service: TgiService, instance: GenerateRequest | ChatRequest) -> tuple[str, GenerateParameters]:
    if isinstance(instance, ChatRequest):
        text = await templated(service, instance)
        return text, GenerateParameters(do_sample=True, max_new_tokens=instance.max_tokens, seed=instance.seed)
    given = instance.parameters
    return instance.inputs, GenerateParameters(do_sample=True, max_new_tokens=given.max_new_tokens, seed=given.seed)
