"""A server that cannot start: one readable line that names key, value and remedy, and exit status 1."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ..tools.server import VLLM, Server, free_port


class Case(NamedTuple):
    flags: str
    env: dict[str, str]
    words: tuple[str, ...]  # of the line


# A process costs seconds of imports, so these few stand for their kinds: a variable, a flag of vLLM's, a flag of ours.
CASES = {
    "buckets": Case("", {"NEURON_CONTEXT_LENGTH_BUCKETS": "128,abc"}, ("NEURON_CONTEXT_LENGTH_BUCKETS", "abc", "128")),
    "cores": Case("--tensor-parallel-size 0", {}, ("tensor_parallel_size", "greater than or equal to 1", "not 0")),
    "override": Case('--override-neuron-config {"fuse_qvk":true}', {}, ("fuse_qvk", "did you mean fuse_qkv")),
}


@pytest.fixture(scope="module")
def ended(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server]]:
    """All of them at once: each is mostly imports."""
    folder = tmp_path_factory.mktemp("start")
    unknown = folder / "unknown"
    unknown.mkdir()
    config = json.loads((smollm2 / "config.json").read_text())
    (unknown / "config.json").write_text(
        json.dumps({**config, "architectures": ["PhiForCausalLM"], "model_type": "phi"})
    )

    def start(name: str, model: Path, flags: str = "", env: dict[str, str] | None = None) -> Server:
        port = free_port()
        words = [VLLM, "serve", str(model), "--port", str(port), "--max-model-len", "128", *flags.split()]
        return Server(words, port, folder / f"{name}.log", env)

    servers = {name: start(name, smollm2, case.flags, case.env) for name, case in CASES.items()}
    servers["architecture"] = start("architecture", unknown)
    servers["directory"] = start("directory", folder / "nowhere")
    try:
        yield servers
    finally:
        for server in servers.values():
            server.close()


def last_line(server: Server) -> str:
    assert server.wait() != 0
    assert "Traceback" not in server.output, server.output
    return server.output.splitlines()[-1]


@pytest.mark.parametrize("name", CASES)
def test_settings(name: str, ended: dict[str, Server]) -> None:
    line = last_line(ended[name])
    assert "error" in line
    assert all(word in line for word in CASES[name].words), line


def test_an_architecture_that_is_not_supported(ended: dict[str, Server]) -> None:
    line = last_line(ended["architecture"])
    assert "PhiForCausalLM" in line
    assert "LlamaForCausalLM" in line


def test_a_directory_that_is_not_there(ended: dict[str, Server]) -> None:
    assert "nowhere" in last_line(ended["directory"])
