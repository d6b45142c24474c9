"""TGI's requests on a device whose sampling is compiled in: the classic library's stand-in, in a server of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ..neuron_worker.tiny_model import tiny_model
from ..tools.server import PATIENCE, VLLM, Server, free_port
from .tgi_client import events

FAKES = str(Path(__file__).resolve().parents[1] / "fakes")

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("compiled")
    model = tiny_model(folder / "model")
    (folder / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    port = free_port()
    command = [VLLM, "serve", model, "--device", "neuron", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-num-seqs", "2", "--max-model-len", "128", "--dtype", "float32"]
    command += ["--neuronserve.backend", "transformers-neuronx", "--neuronserve.sampling", "device"]
    server = Server(command, port, folder / "log", env={"PYTHONPATH": FAKES, "NEURON_RT_NUM_CORES": "2"})
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


def post(server: Server, path: str, **parameters: Any) -> httpx.Response:
    body = {"inputs": "w3 w4", "parameters": {"max_new_tokens": 4, **parameters}}
    return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE)


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 0.7, "top_k": 4, "top_p": 0.9}])
def test_what_the_device_can_do(server: Server, how: dict[str, Any]) -> None:
    answer = post(server, "/generate", details=True, **how)
    assert answer.status_code == 200, answer.text
    details = answer.json()["details"]
    assert [token["logprob"] for token in details["tokens"]] == [0.0] * details["generated_tokens"]
    assert details["seed"] is None
    assert "top_tokens" not in details
    assert events(post(server, "/generate_stream", **how))[-1]["generated_text"]


@pytest.mark.parametrize(
    "asked",
    [
        {"top_n_tokens": 2},
        {"seed": 1, "do_sample": True},
        {"best_of": 2, "do_sample": True},
        {"repetition_penalty": 1.2},
        {"frequency_penalty": 0.5},
        {"typical_p": 0.9},
        {"decoder_input_details": True},
        {"grammar": {"type": "regex", "value": "w5"}},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_it_cannot_is_refused_by_name(server: Server, asked: dict[str, Any]) -> None:
    name = next(iter(asked))
    answer = post(server, "/generate", **asked)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"].startswith(f"Input validation error: `{name}` cannot be had here")
    assert answer.json()["error_type"] == "validation"
    if name not in ("best_of", "decoder_input_details"):
        (event,) = events(post(server, "/generate_stream", **asked))
        assert event["error"] == answer.json()["error"]


def test_and_the_server_goes_on(server: Server) -> None:
    assert post(server, "/generate").status_code == 200
