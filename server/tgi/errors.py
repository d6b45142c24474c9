"""The errors a client can get, and the one place where exceptions become them.

    TgiError                   {"error": ..., "error_type": ...}
      ValidationError          422 validation: the request asks for what cannot be done
      GenerationError          424 generation: the engine failed while it computed the answer
        Unexpected             500 generation: a mistake of ours
      Overloaded               429 overloaded: max_concurrent_requests, or the engine's own queue limit
      Incomplete               500 incomplete_generation: the answer ended without its last token
      Unhealthy                503 healthcheck
      TemplateError            422 template_error
      ToolError                422 tool_error
    ClientLeft                 no answer
    TransportError             plain text: the body never became a request

In a stream the same two fields travel as an event, and the status stays 200.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from vllm.exceptions import GracefulHTTPError, VLLMClientError


class TgiError(Exception):
    status = 500
    error_type = "unknown"
    prefix = ""

    def __init__(self, detail: str) -> None:
        super().__init__(f"{self.prefix}{detail}")

    @property
    def body(self) -> dict[str, str]:
        return {"error": str(self), "error_type": self.error_type}


class ValidationError(TgiError):
    status, error_type, prefix = 422, "validation", "Input validation error: "


class GenerationError(TgiError):
    status, error_type, prefix = 424, "generation", "Request failed during generation: "


class Unexpected(GenerationError):
    status = 500

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error) or type(error).__name__)


class Overloaded(TgiError):
    status, error_type = 429, "overloaded"

    def __init__(self) -> None:
        super().__init__("Model is overloaded")


class Incomplete(TgiError):
    status, error_type = 500, "incomplete_generation"

    def __init__(self) -> None:
        super().__init__("Incomplete generation")


class Unhealthy(TgiError):
    status, error_type = 503, "healthcheck"

    def __init__(self) -> None:
        super().__init__("unhealthy")


class TemplateError(TgiError):
    status, error_type, prefix = 422, "template_error", "Template error: "


class ToolError(TgiError):
    status, error_type, prefix = 422, "tool_error", "Tool error: "


class ClientLeft(Exception):
    """Nobody reads the answer any more."""


class TransportError(Exception):
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def from_engine(error: Exception) -> TgiError:
    """What vLLM raises for a request, in this protocol's words."""
    if isinstance(error, TgiError):
        return error
    if isinstance(error, GracefulHTTPError):
        return Overloaded()
    if isinstance(error, VLLMClientError | ValueError):
        return ValidationError(str(error.args[0]) if error.args else str(error))
    return GenerationError(str(error) or type(error).__name__)


def response(error: TgiError | TransportError) -> Response:
    if isinstance(error, TransportError):
        return PlainTextResponse(str(error), error.status)
    return JSONResponse(error.body, error.status)


async def handler(_: Request, error: Exception) -> Response:
    """For what our rules raise inside a route of vLLM's."""
    assert isinstance(error, TgiError)
    return response(error)
