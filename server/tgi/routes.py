"""TGI's routes. Each reads its body, and answers in the words that TGI's clients know.

Where vLLM owns the same path with another shape, `dispatch` decides whose request it is.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute

from neuronserve.neuron_worker.config import NeuronConfig

from . import body, dispatch, errors, info, parsing, respond, tokenize, vertex
from .errors import ClientLeft, TgiError, TransportError, Unexpected
from .generate import Clock
from .openapi import GENERATES, NOT_PARSED, of_our_routes, request_body, streams
from .schemas import (
    ChatRequest,
    ChatTokenizeResponse,
    CompatGenerateRequest,
    ErrorResponse,
    GenerateRequest,
    GenerateResponse,
    Info,
    SimpleToken,
    VertexRequest,
    VertexResponse,
)
from .service import TgiService
from .sse import EventStream

logger = logging.getLogger(__name__)

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
        except Exception as error:
            logger.exception("an answer could not be made")
            return errors.response(Unexpected(error))

    return with_errors


def post(path: str, **arguments: Any) -> Callable[[Endpoint], Endpoint]:
    """A POST route with its errors answered."""

    def add(endpoint: Endpoint) -> Endpoint:
        router.post(path, response_model=None, **arguments)(answered(endpoint))
        return endpoint

    return add


_COMPLETES = {200: {"description": "Generated text", "model": GenerateResponse}, **GENERATES}
_LISTS = {
    200: {
        "description": "Generated text; a stream where asked",
        "model": list[GenerateResponse],
        "content": {"text/event-stream": {"schema": {"type": "string"}}},
    },
    **GENERATES,
}


@post("/", responses=_LISTS, openapi_extra=request_body(CompatGenerateRequest) | streams())
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
    status_code=200,
    response_class=EventStream,
    openapi_extra=request_body(GenerateRequest) | streams(),
)
async def generate_stream(request: Request) -> Response:
    """Generate a stream of tokens."""
    service, clock = service_of(request), Clock()
    asked = parsing.to_request(await body.read(request, service.settings.payload_limit), GenerateRequest)
    return respond.stream(request, service, asked, clock, full_text=False)


@post("/invocations", responses=_LISTS, openapi_extra=request_body(CompatGenerateRequest) | streams())
async def invocations(request: Request) -> Response:
    """SageMaker: generate, chat or completion, by what the body holds."""
    service, clock = service_of(request), Clock()
    read = await body.read(request, service.settings.payload_limit)
    if dispatch.is_theirs("/invocations", read.value):
        return handed(request, "/invocations", read.raw)
    return await compat(request, service, parsing.to_variant(read, CompatGenerateRequest, "SagemakerRequest"), clock)


@post(
    "/tokenize",
    responses={200: {"description": "Tokens and their places", "model": list[SimpleToken]}, **NOT_PARSED},
    openapi_extra=request_body(GenerateRequest),
)
async def get_tokens(request: Request) -> Response:
    """The tokens of `inputs`, with their places in it in bytes."""
    service = service_of(request)
    read = await body.read(request, service.settings.payload_limit)
    if dispatch.is_theirs("/tokenize", read.value):
        return handed(request, "/tokenize", read.raw)
    asked = parsing.to_request(read, GenerateRequest)
    return JSONResponse([token.model_dump() for token in await tokenize.tokenize(service, asked.inputs)])


def handed(request: Request, path: str, raw: bytes) -> Response:
    theirs: dict[str, APIRoute] = request.app.state.tgi_handed
    return dispatch.Handed(theirs[path], raw)


@post(
    "/chat_tokenize",
    responses={200: {"description": "The chat's text and tokens", "model": ChatTokenizeResponse}, **NOT_PARSED},
    openapi_extra=request_body(ChatRequest),
)
async def get_chat_tokens(request: Request) -> Response:
    """The chat as the model reads it, and its tokens."""
    service = service_of(request)
    asked = parsing.to_request(await body.read(request, service.settings.payload_limit), ChatRequest)
    return JSONResponse((await tokenize.chat_tokenize(service, asked)).model_dump())


@post(
    "/vertex",
    responses={200: {"description": "Generated texts", "model": VertexResponse}, **GENERATES},
    openapi_extra=request_body(VertexRequest),
)
async def vertex_predict(request: Request) -> Response:
    """Vertex AI: several requests in one envelope."""
    service = service_of(request)
    read = await body.read(request, service.settings.payload_limit)
    asked = parsing.to_request(read, VertexRequest)
    work = vertex.predict(service, asked, await service.trace(request.headers))
    return JSONResponse((await respond.unless_client_leaves(request, work)).model_dump())


@router.get("/info", response_model=None, responses={200: {"description": "Model and limits", "model": Info}})
async def get_info(request: Request) -> Response:
    """The model, and the limits of requests."""
    service = service_of(request)
    device = NeuronConfig.of(service.engine.vllm_config).backend
    return JSONResponse(info.info(service.settings, service.limits, device).model_dump())


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


@router.get("/api-doc/openapi.json", include_in_schema=False)
async def openapi(request: Request) -> Response:
    """Of our routes alone; /openapi.json has vLLM's beside them."""
    return JSONResponse(of_our_routes(request.app, PATHS, info.PROTOCOL))


OPERATIONS = {
    (method, route.path)
    for route in router.routes
    if isinstance(route, APIRoute) and route.include_in_schema
    for method in route.methods
}
PATHS = frozenset(path for _, path in OPERATIONS)


METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE")


def mount(app: FastAPI) -> None:
    app.state.tgi_handed = dispatch.their_routes(app)
    app.include_router(router)
    for path in sorted(PATHS):
        methods = sorted(method for method, ours in OPERATIONS if ours == path)
        if "GET" in methods:
            app.router.add_route(
                path, answered(health) if path != "/info" else get_info, ["HEAD"], include_in_schema=False
            )
        app.router.add_route(path, not_allowed(methods), [*METHODS], include_in_schema=False)


def not_allowed(methods: list[str]) -> Endpoint:
    """Behind all routes of a path: its other methods."""

    async def refuse(_: Request) -> Response:
        return Response(status_code=405, headers={"allow": ", ".join(methods)})

    return refuse
