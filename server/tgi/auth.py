"""The API key: whoever generates or tokenizes must show it, on our routes and on vLLM's.

vLLM's own check covers /v1 and a few prefixes; this one covers every path that is not listed as open. Keys come from
--api-key, else VLLM_API_KEY, else API_KEY, as vLLM and TGI's launcher have them. The word Bearer may have any case; the
key is compared exactly, and in constant time.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Awaitable, Iterable, Mapping

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

OPEN = frozenset(
    {
        "/",
        "/api-doc/openapi.json",
        "/docs",
        "/docs/oauth2-redirect",
        "/health",
        "/info",
        "/load",
        "/metrics",
        "/openapi.json",
        "/ping",
        "/redoc",
        "/version",
    }
)
"""Paths that may be read without a key. Read: `/` is also a path that generates, by POST."""


def keys(given: Iterable[str] | None, environ: Mapping[str, str]) -> list[str]:
    """The first source that has any."""
    for source in (given or (), (environ.get("VLLM_API_KEY"),), (environ.get("API_KEY"),)):
        if found := [key for key in source if key]:
            return found
    return []


def is_open(method: str, path: str) -> bool:
    if method == "OPTIONS":  # asked by browsers before they send anything of the user's
        return True
    reads = method in ("GET", "HEAD") or (method, path) == ("POST", "/ping")
    return reads and (path in OPEN or path.startswith(("/metrics/", "/static/")))


class ApiKey:
    """ASGI middleware; an empty 401 to whoever has no key."""

    def __init__(self, app: ASGIApp, keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] not in ("http", "websocket"):
            return self._app(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if is_open(scope.get("method", ""), path) or self._knows(Headers(scope=scope).get("authorization", "")):
            return self._app(scope, receive, send)
        return Response(status_code=401)(scope, receive, send)

    def _knows(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        shown = _digest(key)
        found = False
        for digest in self._digests:  # all of them, whichever matches
            found |= secrets.compare_digest(shown, digest)
        return found and scheme.lower() == "bearer"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()
