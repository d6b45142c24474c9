"""What a client reads when something goes wrong that nobody thought of."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.testclient import TestClient

from neuronserve.server.tgi.admission import Admission
from neuronserve.server.tgi.metrics import Recorder
from neuronserve.server.tgi.settings import TgiSettings

from .app import build

BODY = {"error": "Request failed during generation: a mistake", "error_type": "generation"}


async def mistaken(*_: Any, **__: Any) -> None:
    raise ValueError("a mistake")


@pytest.fixture
def app() -> FastAPI:
    made = build()
    made.state.tgi = SimpleNamespace(
        settings=TgiSettings(),
        admission=Admission(1),
        recorder=Recorder(8, 16, CollectorRegistry()),
        compute_type="1-cpu",
        prepare=mistaken,
        vocabulary=SimpleNamespace(encode_with_places=mistaken),
        trace=mistaken,
    )
    return made


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/", {"inputs": "a"}),
        ("/generate", {"inputs": "a"}),
        ("/tokenize", {"inputs": "a"}),
        ("/vertex", {"instances": [{"inputs": "a"}]}),
    ],
)
def test_a_mistake_of_ours_is_a_500_in_tgi_s_form(app: FastAPI, path: str, body: Any) -> None:
    answer = TestClient(app).post(path, json=body)
    assert (answer.status_code, answer.json()) == (500, BODY)


def test_and_the_same_in_a_stream(app: FastAPI) -> None:
    answer = TestClient(app).post("/generate_stream", json={"inputs": "a"})
    assert answer.status_code == 200
    assert json.loads(answer.text.removeprefix("data: ")) == BODY
