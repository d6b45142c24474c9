"""TGI's routes. Each reads its body, and answers in the words that TGI's clients know.

Where vLLM owns the same path with another shape, `dispatch` decides whose request it is.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from . import body, errors, info, parsing, respond
from .errors import ClientLeft, TgiError, TransportError
from .generate import Clock
from .openapi import GENERATES, request_body
from .schemas import CompatGenerateRequest, ErrorResponse, GenerateRequest, GenerateResponse, Info
from .service import TgiService
from .sse import EventStream

router = APIRouter(tags=[info.ROUTER])

Endpoint = Callable[[Request], Awaitable[Response]]


def service_of(request: Request) -> TgiService:
    service: TgiService = request.app.state.tgi
    return service


def answered(endpoint: Endpoint) -> Endpoint:
    """The one place where errors become answers."""

    @functools.wraps(endpoint)
    async def with_errors(request: Request) -> Response:
        try:
            return await endpoint(request)
        except (TgiError, TransportError) as error:
            return errors.response(error)
        except ClientLeft:
            return Response(status_code=499)  # goes nowhere, but to the access log

    return with_errors


def post(path: str, **arguments: Any) -> Callable[[Endpoint], Endpoint]:
    """A POST route with its errors answered."""

    def add(endpoint: Endpoint) -> Endpoint:
        router.post(path, response_model=None, **arguments)(answered(endpoint))
        return endpoint

    return add


_COMPLETES = {200: {"description": "Generated text", "model": GenerateResponse}, **GENERATES}
_LISTS = {200: {"description": "Generated text; a stream where asked", "model": list[GenerateResponse]}, **GENERATES}


@post("/", responses=_LISTS, openapi_extra=request_body(CompatGenerateRequest))
async def compat_generate(request: Request) -> Response:
    """Generate tokens; `stream` says how they come."""
    service, clock = service_of(request), Clock()
    asked = parsing.to_request(await body.read(request, service.settings.payload_limit), CompatGenerateRequest)
    return await compat(request, service, asked, clock)


async def compat(request: Request, service: TgiService, asked: CompatGenerateRequest, clock: Clock) -> Response:
    full_text = service.settings.model_pipeline_tag in (None, "text-generation")
    if asked.stream:
        return respond.stream(request, service, asked, clock, full_text=full_text)
    return await respond.whole(request, service, asked, clock, full_text=full_text, as_list=True)


@post("/generate", responses=_COMPLETES, openapi_extra=request_body(GenerateRequest))
async def generate(request: Request) -> Response:
    """Generate tokens."""
    service, clock = service_of(request), Clock()
    asked = parsing.to_request(await body.read(request, service.settings.payload_limit), GenerateRequest)
    return await respond.whole(request, service, asked, clock, full_text=False, as_list=False)


@post(
    "/generate_stream",
    responses={200: {"description": "An event for each token, or one with an error"}, **GENERATES},
    response_class=EventStream,
    openapi_extra=request_body(GenerateRequest),
)
async def generate_stream(request: Request) -> Response:
    """Generate a stream of tokens."""
    service, clock = service_of(request), Clock()
    asked = parsing.to_request(await body.read(request, service.settings.payload_limit), GenerateRequest)
    return respond.stream(request, service, asked, clock, full_text=False)


@router.get("/info", response_model=None, responses={200: {"description": "Model and limits", "model": Info}})
async def get_info(request: Request) -> Response:
    """The model, and the limits of requests."""
    service = service_of(request)
    return JSONResponse(info.info(service.settings, service.limits).model_dump())


_HEALTH: dict[int | str, dict[str, Any]] = {
    200: {"description": "Everything works"},
    503: {"description": "The engine does not answer", "model": ErrorResponse},
}


@router.get("/ping", response_class=Response, response_model=None, responses=_HEALTH)
@router.get("/health", response_class=Response, response_model=None, responses=_HEALTH)
@router.get("/", response_class=Response, response_model=None, responses=_HEALTH)
@answered
async def health(request: Request) -> Response:
    """Whether the engine answers."""
    await service_of(request).check_health()
    return Response()
