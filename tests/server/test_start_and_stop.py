"""`vllm serve` as a process on the arithmetic device: how it fails to start, and how it stops."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.neuron_worker.tiny_model import tiny_model
from tests.tools.server import PATIENCE, VLLM, Server, free_port

OLD_SHELL = {
    "VLLM_TARGET_DEVICE": "neuron",
    "VLLM_USE_V1": "0",
    "VLLM_NEURON_FRAMEWORK": "transformers-neuronx",
    "NEURON_COMPILED_ARTIFACTS": "/nowhere",
    "NEURON_CONTEXT_LENGTH_BUCKETS": "128,32,,128",
}
NUM_TOKENS = 2000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny_model(tmp_path_factory.mktemp("model"))


def serve(model: str, port: int, log: Path, *flags: str, **env: str) -> Server:
    return Server([VLLM, "serve", model, "--host", "127.0.0.1", "--port", str(port), *flags], port, log, env)


def what_it_said(server: Server) -> str:
    """Of a server that cannot start: everything, and no traceback."""
    assert server.wait() == 1, server.output
    server.close()
    assert "Traceback" not in server.output
    return server.output


def tokens(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if line.startswith("data: {"):
            event: dict[str, Any] = json.loads(line[6:])
            assert "choices" in event, event
            yield event["choices"][0]


def assert_nothing_alarming(output: str) -> None:
    """Nobody who stops a server wants to read of errors."""
    assert "Traceback" not in output
    assert " ERROR " not in output


def test_a_setting_that_cannot_be_served_is_one_line(model: str, tmp_path: Path) -> None:
    output = what_it_said(serve(model, free_port(), tmp_path / "log", "--max-model-len", "128", "--block-size", "24"))

    assert output.splitlines()[-1].startswith("error: --block-size 24 does not divide --max-model-len 128: use")


def test_a_model_that_cannot_be_loaded_is_one_line(model: str, tmp_path: Path) -> None:
    # The tiny model has no weights, which the engine process finds out.
    output = what_it_said(serve(model, free_port(), tmp_path / "log", "--max-model-len", "128", "--max-num-seqs", "1"))

    assert output.count("has neither model.safetensors") == 1
    assert "error: the engine did not start; its error is above" in output


def test_a_server_from_an_old_shell_until_it_is_told_to_stop(model: str, tmp_path: Path) -> None:
    port = free_port()
    flags = ("--device", "neuron", "--neuronserve.backend", "arithmetic")
    server = serve(model, port, tmp_path / "log", *flags, **OLD_SHELL).wait_until_ready()
    try:
        assert "VLLM_USE_V1=0 is ignored" in server.output
        assert "NEURON_COMPILED_ARTIFACTS is ignored" in server.output
        assert "NEURON_CONTEXT_LENGTH_BUCKETS: 32, 128\n" in server.output
        assert "no Neuron device on this machine" in server.output
        assert "Unknown vLLM environment variable" not in server.output

        second = what_it_said(serve(model, port, tmp_path / "second"))
        assert f"error: cannot listen on 127.0.0.1:{port} (Address already in use)" in second

        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=PATIENCE
        ) as response:
            choices = tokens(response.iter_lines())
            first = next(choices)
            server.process.send_signal(signal.SIGTERM)
            rest = list(choices)

        assert len(" ".join(choice["text"] for choice in (first, *rest)).split()) == NUM_TOKENS
        assert rest[-1]["finish_reason"] == "length"
        assert server.wait() == 0
        assert_nothing_alarming(server.output)
    finally:
        server.close()


def test_an_answer_longer_than_the_drain_s_limit_is_cut(tmp_path: Path) -> None:
    endless = 100_000  # tokens: minutes, where the limit is a second
    model = tiny_model(tmp_path / "model", max_position_embeddings=2 * endless)
    flags = ("--neuronserve.backend", "arithmetic", "--shutdown-timeout", "1")
    server = serve(model, free_port(), tmp_path / "log", *flags).wait_until_ready()
    try:
        body = {"model": model, "prompt": [5, 6, 7], "max_tokens": endless, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
            lines = response.iter_lines()
            choices = tokens(lines)
            next(choices)
            server.process.send_signal(signal.SIGINT)
            rest = list(choices)

        assert rest[-1]["finish_reason"] == "abort"
        assert len(rest) < endless
        assert server.wait() == 0
        assert "requests cut after 1 s (--shutdown-timeout): 1" in server.output
        assert_nothing_alarming(server.output)
    finally:
        server.close()


@pytest.mark.full
def test_a_server_of_two_api_processes_ends_its_answers_before_itself(model: str, tmp_path: Path) -> None:
    flags = ("--neuronserve.backend", "arithmetic", "--api-server-count", "2")
    server = serve(model, free_port(), tmp_path / "log", *flags).wait_until_ready()
    body = {"model": model, "prompt": [5, 6, 7], "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    try:
        with ExitStack() as streams:  # a connection each, so that both processes get some
            answers: list[tuple[dict[str, Any], Iterator[dict[str, Any]]]] = []
            for _ in range(6):
                stream = httpx.stream(
                    "POST", f"{server.url}/v1/completions", json=body | {"stream": True}, timeout=PATIENCE
                )
                choices = tokens(streams.enter_context(stream).iter_lines())
                answers.append((next(choices), choices))
            server.process.send_signal(signal.SIGTERM)
            for first, rest in answers:
                whole = [first, *rest]
                assert len(" ".join(choice["text"] for choice in whole).split()) == NUM_TOKENS
                assert whole[-1]["finish_reason"] == "length"

        assert server.wait() == 0
        assert_nothing_alarming(server.output)
    finally:
        server.close()
