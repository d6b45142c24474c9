"""The API key: every route of vLLM's real app is walked, with and without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from neuronserve.server.tgi import auth

from .app import build

KEY = "s3cret"
GENERATES = {
    "/",
    "/chat_tokenize",
    "/detokenize",
    "/generate",
    "/generate_stream",
    "/invocations",
    "/tokenize",
    "/v1/chat/completions",
    "/v1/completions",
    "/vertex",
}


@pytest.fixture(scope="module")
def app() -> FastAPI:
    return build("--api-key", KEY)


def operations(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        methods = getattr(route, "methods", None) or {"GET", "POST"}
        for method in methods:
            yield method, getattr(route, "path", "/")


def answers(app: FastAPI, method: str, path: str, **headers: str) -> int:
    client = TestClient(app, raise_server_exceptions=False)
    return client.request(
        method, path, headers={name.replace("_", "-"): value for name, value in headers.items()}
    ).status_code


def test_every_route_that_is_not_listed_as_open_wants_the_key(app: FastAPI) -> None:
    walked = {(method, path) for method, path in operations(app) if not auth.is_open(method, path)}
    assert {path for method, path in walked if method == "POST"} >= GENERATES
    unguarded = [(method, path) for method, path in sorted(walked) if answers(app, method, path) != 401]
    assert unguarded == []


def test_nothing_that_can_be_posted_is_open_but_ping(app: FastAPI) -> None:
    assert {path for method, path in operations(app) if method == "POST" and auth.is_open(method, path)} == {"/ping"}


def test_the_key_opens(app: FastAPI) -> None:
    # No engine behind it: what comes through is refused for its content type.
    for path in GENERATES:
        assert answers(app, "POST", path, authorization=f"Bearer {KEY}") != 401


@pytest.mark.parametrize(
    "header", ["", KEY, f"Basic {KEY}", "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Bearer  {KEY}"]
)
def test_what_is_no_key(app: FastAPI, header: str) -> None:
    assert answers(app, "POST", "/generate", authorization=header) == 401


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer {KEY}", f"BEARER {KEY}"])
def test_the_scheme_in_any_case(app: FastAPI, header: str) -> None:
    assert answers(app, "POST", "/generate", authorization=header) != 401


def test_the_refusal_is_empty(app: FastAPI) -> None:
    refused = TestClient(app).post("/generate", json={"inputs": "a"})
    assert (refused.status_code, refused.content) == (401, b"")


def test_a_browser_may_ask_what_it_may_send(app: FastAPI) -> None:
    asked = {"origin": "http://a", "access_control_request_method": "POST"}
    assert answers(app, "OPTIONS", "/generate", **asked) != 401


@pytest.mark.parametrize(
    ("given", "environ", "found"),
    [
        (["a", "b"], {"VLLM_API_KEY": "c", "API_KEY": "d"}, ["a", "b"]),
        (None, {"VLLM_API_KEY": "c", "API_KEY": "d"}, ["c"]),
        ([], {"API_KEY": "d"}, ["d"]),
        ([""], {"VLLM_API_KEY": "", "API_KEY": "d"}, ["d"]),
        (None, {}, []),
    ],
)
def test_where_keys_come_from(given: list[str] | None, environ: dict[str, str], found: list[str]) -> None:
    assert auth.keys(given, environ) == found


def test_tgi_s_variable_guards_vllm_s_routes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", KEY)
    app = build()
    assert answers(app, "POST", "/v1/completions") == 401
    assert answers(app, "POST", "/generate") == 401


def test_without_a_key_nothing_is_asked() -> None:
    assert answers(build(), "POST", "/generate") != 401
