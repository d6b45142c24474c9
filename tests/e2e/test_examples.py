"""The examples do what they say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ..tools.server import PATIENCE, Server, clean_environment
from .conftest import MODEL

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def run(*command: str, text: str = "", **env: str) -> str:
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, env=clean_environment(**env), timeout=PATIENCE, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_offline(smollm2: Path, tmp_path: Path) -> None:
    printed = run(sys.executable, str(EXAMPLES / "offline.py"), str(smollm2), "--max-tokens", "8")
    assert "'The capital of France is' -> ' Paris" in printed
    assert "'def fibonacci(n):\\n' -> " in printed


def test_chat_client(server: Server) -> None:
    questions = "What is the capital of France?\nSay it again.\n\n"
    client = str(EXAMPLES / "chat_client.py")
    printed = run(sys.executable, client, "--url", f"{server.url}/v1", "--temperature", "0", text=questions)
    assert printed.startswith("> The capital of France is Paris.\n> ")
    assert printed.count("> ") == 3


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_curl(server: Server) -> None:
    parts = run(str(EXAMPLES / "curl.sh"), URL=server.url, MODEL=MODEL).split("-- ")[1:]
    completion, stream, schema, logprobs, tool = parts
    assert '"text":" Paris' in completion
    assert stream.count("data: ") > 3
    assert stream.rstrip().endswith("data: [DONE]")
    assert r"\"age\":" in schema
    assert '"name":"weather"' in tool
    assert '"prompt_logprobs":[null,' in logprobs


def test_every_example_is_listed() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"`{path.name}`" in listed for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))
