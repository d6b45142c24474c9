"""One real server for all of these tests, and OpenAI's own client.

Of the package, not the session: their gigabytes are given back before the other tests run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from ..tools.server import BIN, PATIENCE, VLLM, Server, free_port

MODEL = "smollm2"
LENGTH = 1024
PLACES = 8

FLAGS = [
    "--device", "neuron",
    "--host", "127.0.0.1",
    "--served-model-name", MODEL,
    "--max-model-len", str(LENGTH),
    "--max-num-seqs", str(PLACES),
    "--enable-auto-tool-choice",
    "--tool-call-parser", "hermes",
]  # fmt: skip


@pytest.fixture(scope="package")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    port = free_port()
    command = [VLLM, "serve", str(smollm2), "--port", str(port), *FLAGS]
    server = Server(command, port, tmp_path_factory.mktemp("server") / "log")
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


@pytest.fixture(scope="package")
def tgi_server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """As people who come from TGI start it."""
    port = free_port()
    command = [str(BIN / "text-generation-launcher"), "--model-id", str(smollm2), "--hostname", "127.0.0.1"]
    command += ["--port", str(port), "--max-batch-size", str(PLACES), "--max-total-tokens", str(LENGTH)]
    server = Server(command, port, tmp_path_factory.mktemp("tgi") / "log")
    try:
        yield server.wait_until_ready()
    finally:
        server.close()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """A failed test shows the last lines of the server's log."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    arguments = getattr(item, "funcargs", {})
    server = arguments.get("server") or arguments.get("tgi_server")
    if report.failed and isinstance(server, Server):
        report.sections.append(("server log", server.output[-6000:]))


@pytest.fixture(scope="package")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)
