"""What the plugin makes of vLLM's app, by its flags."""

from __future__ import annotations

import json

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from .app import build

OURS = {"/", "/generate", "/generate_stream", "/chat_tokenize", "/vertex", "/info", "/api-doc/openapi.json"}


def paths(app: FastAPI) -> set[str]:
    return {getattr(route, "path", "") for route in app.routes}


def test_the_routes_are_there_unasked() -> None:
    assert paths(build()) >= OURS


@pytest.mark.parametrize("words", [["--no-tgi"], ["--neuronserve.tgi", "false"], ["--neuronserve", '{"tgi": false}']])
def test_and_can_be_left_out(words: list[str]) -> None:
    app = build(*words)
    assert paths(app) & OURS == set()
    assert paths(app) >= {"/health", "/tokenize", "/invocations", "/v1/completions"}


def test_left_out_by_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONSERVE_TGI", "0")
    assert paths(build()) & OURS == set()


@pytest.mark.parametrize(
    ("settings", "flags", "origin", "allowed"),
    [
        ({}, [], "http://a", None),  # vLLM's default
        ({}, ["--allowed-origins", '["http://a"]'], "http://a", "http://a"),
        ({"any_model_name": True}, [], "http://a", "*"),  # TGI's
        ({"any_model_name": True}, ["--allowed-origins", '["http://b"]'], "http://a", None),
        ({"cors_allow_origin": ["http://a"]}, [], "http://a", "http://a"),
        ({"cors_allow_origin": ["http://a"]}, [], "http://b", None),
    ],
)
def test_which_origins_may_ask(settings: object, flags: list[str], origin: str, allowed: str | None) -> None:
    app = build("--neuronserve", json.dumps({"tgi": settings}), *flags)
    asked = {"origin": origin, "access-control-request-method": "POST"}
    answer = TestClient(app).options("/generate", headers=asked)
    assert answer.headers.get("access-control-allow-origin") == allowed


def test_the_openapi_page_names_every_route_of_ours() -> None:
    document = TestClient(build()).get("/api-doc/openapi.json").json()
    assert set(document["paths"]) == OURS - {"/api-doc/openapi.json"} | {
        "/health",
        "/ping",
        "/tokenize",
        "/invocations",
    }
    assert set(document["paths"]["/"]) == {"get", "post"}
    parameters = document["paths"]["/generate"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "temperature" in parameters["properties"]["parameters"]["properties"]
    assert "$ref" not in json.dumps(parameters)
