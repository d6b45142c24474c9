"""The commands a person types: what `make` would run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT


def clean_environment() -> dict[str, str]:
    """Without what a `make test PORT=…` around this suite hands down."""
    handed_down = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "VENV", "PYTHON", "PORT"}
    return {key: value for key, value in os.environ.items() if key not in handed_down}


def make(*arguments: str) -> str:
    command = ["make", *arguments]
    return subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=True).stdout


def recipe(*arguments: str) -> str:
    return make("--dry-run", "--no-print-directory", *arguments)


def test_serve_honours_port_and_sends_no_statistics() -> None:
    text = recipe("serve", "PORT=8123")

    assert "--device neuron" in text
    assert "--port 8123" in text
    assert "VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1" in text


def test_only_this_machine_is_served_unless_asked_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "HOST", "x86_64-conda-linux-gnu")

    assert "--host 127.0.0.1" in recipe("serve")
    assert "--host 0.0.0.0" in recipe("serve", "HOST=0.0.0.0")


def test_serve_takes_another_model_and_flags() -> None:
    text = recipe("serve", "MODEL=org/name", "ARGS=--max-num-seqs 4")

    assert '"org/name"' in text
    assert "--max-num-seqs 4" in text
    assert "demo_model" not in text


def test_every_target_sets_up_first() -> None:
    for target in ("serve", "test", "test-full", "demo-model", "bench", "lint", "wheelhouse"):
        assert recipe(target).startswith("python3 scripts/set_up.py --venv .venv"), target


@pytest.mark.skipif(Path(sys.prefix) != ROOT / ".venv", reason="make would set up an environment of its own")
def test_demo_model_prints_the_directory_alone(smollm2: Path) -> None:
    assert make("--silent", "demo-model", f"PYTHON={sys.executable}") == f"{smollm2}\n"
