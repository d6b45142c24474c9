"""Routes of OpenAI's and vLLM's APIs that need a model of another kind: refused by name, where a 404 would not say why.

Added behind all other routes, so one that is really served wins. Knows HTTP; knows no engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

_NEEDS = {
    "an embedding model": ("/v1/embeddings", "/v2/embed", "/pooling"),
    "a scoring model": ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify"),
    "a speech model": ("/v1/audio/transcriptions", "/v1/audio/translations"),
}

INSTEAD = "this server generates text: use /v1/chat/completions or /v1/completions"


def add_to(app: FastAPI) -> None:
    for needed, paths in _NEEDS.items():
        for path in paths:
            app.add_api_route(path, _refusal(path, needed), methods=["POST"], include_in_schema=False)


def _refusal(path: str, needed: str) -> Callable[[Request], Awaitable[JSONResponse]]:
    async def refuse(_: Request) -> JSONResponse:
        message = f"{path} needs {needed}, which is not supported; {INSTEAD}"
        error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
        return JSONResponse({"error": error}, status_code=400)

    return refuse
