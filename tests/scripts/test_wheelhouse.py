"""The wheelhouse: installed without an index into an empty environment, it serves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from .conftest import ROOT

pytestmark = pytest.mark.full

START_LIMIT_S = 300


@pytest.fixture(scope="module")
def wheelhouse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels") / "wheelhouse"
    subprocess.run([sys.executable, ROOT / "scripts" / "wheelhouse.py", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def installed(wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment that has nothing but what the wheelhouse holds."""
    folder = tmp_path_factory.mktemp("user") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip(folder, *FROM, wheelhouse, "--no-deps", "--requirement", wheelhouse / "requirements.lock")
    return folder / "bin"


FROM = ("install", "--quiet", "--no-index", "--find-links")


def pip(folder: Path, *arguments: str | Path) -> None:
    # No configuration of pip's may lend a wheel.
    clean = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment = clean | {"PIP_CONFIG_FILE": os.devnull}
    subprocess.run([folder / "bin" / "pip", *arguments], check=True, cwd=folder, env=environment)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(bin_folder: Path, model: Path, port: int) -> Iterator[None]:
    command = [bin_folder / "vllm", "serve", model, "--served-model-name", "demo", "--device", "neuron"]
    # The environment's own bin alone: no build tool of this one may be found by accident.
    environment = os.environ | {"PATH": f"{bin_folder}:/usr/bin:/bin", "VLLM_NO_USAGE_STATS": "1"}
    server = subprocess.Popen([*command, "--host", "127.0.0.1", "--port", str(port)], cwd=bin_folder, env=environment)
    try:
        wait_until_ready(server, port)
        yield
    finally:
        server.terminate()
        server.wait(timeout=120)


def wait_until_ready(server: subprocess.Popen[bytes], port: int) -> None:
    limit = time.monotonic() + START_LIMIT_S
    while time.monotonic() < limit:
        assert server.poll() is None, f"the server ended with {server.returncode}"
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
        except OSError:
            time.sleep(0.5)
        else:
            return
    pytest.fail(f"not ready after {START_LIMIT_S} s")


def test_the_lock_has_the_digest_of_every_wheel(wheelhouse: Path) -> None:
    lines = (wheelhouse / "requirements.lock").read_text().splitlines()

    # All but triton, which is there for pip's resolver alone.
    assert len(lines) == len([wheel for wheel in wheelhouse.glob("*.whl") if not wheel.name.startswith("triton-")])
    assert all("==" in line and "--hash=sha256:" in line for line in lines)


def test_vllm_is_one_pure_python_wheel(wheelhouse: Path) -> None:
    assert [path.name for path in wheelhouse.glob("vllm-*")] == ["vllm-0.32.0-py3-none-any.whl"]


def test_pips_resolver_finds_everything_it_asks_for(wheelhouse: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True)

    pip(tmp_path, *FROM, wheelhouse, "--dry-run", "neuronserve[serve]")


def test_it_serves_from_an_empty_environment(installed: Path, smollm2: Path) -> None:
    port = free_port()
    question = {"role": "user", "content": "What is the capital of France?"}
    body = {"model": "demo", "messages": [question], "temperature": 0, "max_tokens": 8}

    with serving(installed, smollm2, port):
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        answer = json.load(urllib.request.urlopen(request, timeout=120))

    assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
