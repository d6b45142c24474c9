"""What the OpenAPI page says of our routes: their bodies are parsed by hand, so FastAPI cannot know them."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel

from .schemas import ErrorResponse

TITLE = "Text Generation Inference"

_TEXT = {"text/plain": {"schema": {"type": "string"}}}

NOT_PARSED: dict[int | str, dict[str, Any]] = {
    400: {"description": "The body is not JSON", "content": _TEXT},
    401: {"description": "The API key is missing or wrong"},
    413: {"description": "The body is too large", "content": _TEXT},
    415: {"description": "The content type is not JSON", "content": _TEXT},
    422: {"description": "Validation error", "model": ErrorResponse, "content": _TEXT},
}
GENERATES: dict[int | str, dict[str, Any]] = {
    **NOT_PARSED,
    424: {"description": "The engine failed while it computed the answer", "model": ErrorResponse},
    429: {"description": "Model is overloaded", "model": ErrorResponse},
    500: {"description": "Incomplete generation, or a mistake of the server's", "model": ErrorResponse},
}


EVENTS: dict[str, Any] = {
    "type": "object",
    "required": ["data"],
    "properties": {"data": {"type": "string", "contentMediaType": "application/json"}},
}
"""One event of a stream, as OpenAPI describes those; FastAPI would say that it is a text."""


def streams() -> dict[str, Any]:
    """For `openapi_extra`: the answer may be a stream of events."""
    return {"responses": {"200": {"content": {"text/event-stream": {"schema": dict(EVENTS)}}}}}


def request_body(*models: type[BaseModel]) -> dict[str, Any]:
    """For `openapi_extra`. Several models: any of them."""
    schemas = [inlined(model.model_json_schema(by_alias=True)) for model in models]
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with what its references name in their places; ours do not refer to themselves."""
    definitions = schema.get("$defs", {})

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if (name := node.get("$ref")) is not None:
            return resolve(definitions[name.rsplit("/", 1)[1]])
        # A discriminator's mapping names references too; the variants' `type` says the same.
        return {key: resolve(value) for key, value in node.items() if key not in ("$defs", "discriminator")}

    resolved: dict[str, Any] = resolve(schema)
    return resolved


def of_our_routes(app: FastAPI, paths: frozenset[str], version: str) -> dict[str, Any]:
    routes = [route for route in app.routes if isinstance(route, APIRoute) and route.path in paths]
    return get_openapi(title=TITLE, version=version, routes=routes)
