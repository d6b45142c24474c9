"""`text-generation-launcher` as its users start it: the documents' lines, a real server, and Ctrl-C at the end."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from ..neuron_worker.tiny_model import VOCAB_SIZE, tiny_model
from ..server.launcher.documented import GPT2, ZEPHYR, docker_run
from ..tools.server import BIN, PATIENCE, Server, free_port

LAUNCHER = str(BIN / "text-generation-launcher")
KEY = "sesame"
MOMENTS = ("Starting shard", "Shard ready in", "Starting Webserver", "Connected")
EOS = 2


@pytest.fixture(scope="module")
def endpoint(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tutorial's endpoint, its model replaced by one that is here."""
    port = free_port()
    environ = {
        **ZEPHYR,
        "HF_MODEL_ID": str(smollm2),
        "SAGEMAKER_BIND_TO_PORT": str(port),
        "PORT": "80",  # of an image for other hosts
        "HOSTNAME": "127.0.0.1",
        "API_KEY": KEY,
    }
    log = tmp_path_factory.mktemp("launcher") / "log"
    server = Server([LAUNCHER, "serve", "--json-output"], port, log, environ)
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


def post(server: Server, path: str, body: dict[str, Any], key: str = KEY) -> httpx.Response:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=PATIENCE)


def messages(server: Server) -> list[str]:
    return [json.loads(line)["message"] for line in server.output.splitlines()]


def test_the_endpoint_serves_what_its_variables_say(endpoint: Server) -> None:
    assert httpx.get(f"{endpoint.url}/ping").status_code == 200
    info = httpx.get(f"{endpoint.url}/info").json()
    expected = {"max_concurrent_requests": 4, "max_input_tokens": 1512, "max_total_tokens": 2048}
    assert {key: info[key] for key in expected} == expected


def test_the_predictor_s_payload(endpoint: Server) -> None:
    payload = {
        "do_sample": True,
        "top_p": 0.6,
        "temperature": 0.9,
        "top_k": 50,
        "max_new_tokens": 8,
        "repetition_penalty": 1.03,
        "return_full_text": False,
        "stop": ["</s>"],
    }
    answer = post(endpoint, "/invocations", {"inputs": "The capital of France is", "parameters": payload})
    assert answer.status_code == 200
    assert list(answer.json()[0]) == ["generated_text"]


def test_generate(endpoint: Server) -> None:
    body = {"inputs": "What is Deep Learning?", "parameters": {"max_new_tokens": 20}}
    assert post(endpoint, "/generate", body).json()["generated_text"]


def test_any_model_s_name_will_do(endpoint: Server) -> None:
    body = {"model": "tgi", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    assert post(endpoint, "/v1/chat/completions", body).status_code == 200


def test_the_key_is_wanted_and_stands_on_no_command_line(endpoint: Server) -> None:
    body = {"inputs": "Hello", "parameters": {"max_new_tokens": 1}}
    assert post(endpoint, "/generate", body, key="other").status_code == 401
    server = psutil.Process(endpoint.process.pid)
    assert KEY not in " ".join(word for process in (server, *server.children()) for word in process.cmdline())
    assert KEY not in endpoint.output


def test_it_is_one_process_tree_that_began_as_the_launcher(endpoint: Server) -> None:
    command = psutil.Process(endpoint.process.pid).cmdline()
    assert command[1:4] == ["-m", "neuronserve.server.launcher.serving", "serve"]


def test_every_line_of_its_log_is_json_and_the_known_ones_come_in_order(endpoint: Server) -> None:
    said = messages(endpoint)
    at = [next(index for index, message in enumerate(said) if message.startswith(moment)) for moment in MOMENTS]

    assert at == sorted(at)
    assert sum("Setting max batch total tokens to 8192" in message for message in said) == 1
    assert any(message.split() == ["max_num_seqs", "4", *_QUOTIENT] for message in said)
    assert not any("Traceback" in message for message in said)


_QUOTIENT = ["max_batch_total_tokens", "/", "max_total_tokens"]


@pytest.fixture
def gpt2(tmp_path: Path) -> str:
    """Two layers of noise that never say the end-of-sequence token."""
    directory = tmp_path / "model"
    tiny_model(directory)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCAB_SIZE, n_positions=1024, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=EOS
    )
    model = GPT2LMHeadModel(config)
    with torch.no_grad():
        model.transformer.wte.weight[EOS] = 0
    model.save_pretrained(directory)
    return str(directory)


def test_the_gpt2_line_until_ctrl_c(gpt2: str, tmp_path: Path) -> None:
    typed = docker_run(GPT2)
    flags = [gpt2 if word == "optimum/gpt2-neuronx-bs16" else word for word in typed.argv]
    port = free_port()
    listen = ["--hostname", "127.0.0.1", "--port", str(port)]
    server = Server([LAUNCHER, *flags, *listen], port, tmp_path / "log", typed.environ)
    try:
        info = httpx.get(f"{server.wait_until_ready().url}/info").json()
        expected = {"max_concurrent_requests": 16, "max_input_tokens": 512, "max_total_tokens": 1024}
        assert {key: info[key] for key in expected} == expected
        assert "max_batch_prefill_tokens=8192 caps nothing" in server.output
        assert "16 sequences of up to 1024 tokens" in server.output
        assert all(moment in server.output for moment in MOMENTS)

        body = {"inputs": "w5 w6 w7", "parameters": {"max_new_tokens": 900, "details": True}}
        with httpx.stream("POST", f"{server.url}/generate_stream", json=body, timeout=PATIENCE) as response:
            events = (json.loads(line[5:]) for line in response.iter_lines() if line.startswith("data:"))
            first = next(events)
            press_ctrl_c(server)
            rest = list(events)

        assert first["token"]["id"] != EOS
        assert len(rest) == 899
        assert rest[-1]["details"]["finish_reason"] == "length"
        assert server.wait() == 0, server.output
        assert "Shutting down shards" in server.output
        assert "Traceback" not in server.output
    finally:
        server.close()


def press_ctrl_c(server: Server) -> None:
    """A terminal tells every process of the group, not the first one alone."""
    first = psutil.Process(server.process.pid)
    for process in (*first.children(recursive=True), first):
        process.send_signal(signal.SIGINT)
