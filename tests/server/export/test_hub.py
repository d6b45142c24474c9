"""An export to the hub and back, over huggingface_hub and HTTP."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuronserve.server.export import read_settings
from tests.tools import hub

EXPORT = "import sys; from neuronserve.server.cli import main; sys.exit(main(['export', *sys.argv[1:]]))"
FETCH = (
    "import sys; from neuronserve.neuron_worker.model_files import local_directory; "
    "print(local_directory('me/it', None, sys.argv[1]))"
)


@pytest.fixture
def models() -> Iterator[hub.Hub]:
    with hub.served() as models:
        yield models


def client(models: hub.Hub, code: str, *words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: the client reads its environment once."""
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env={**os.environ, **models.environ}, capture_output=True, text=True, check=False)


def files_of(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}


def test_what_was_uploaded_is_what_a_start_fetches(models: hub.Hub, checkpoint: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--batch-size", "4", "--sequence-length", "64", "--push-to-hub", "me/it", "--private"]
    done = client(models, EXPORT, checkpoint, str(out), *words)

    assert done.returncode == 0, done.stderr
    assert f"uploaded to me/it ({hub.REVISION[:12]})\n" in done.stdout
    assert models.repositories == {"me/it": files_of(out)}
    assert (models.private, models.messages) == ({"me/it"}, ["Exported by neuronserve"])
    assert len(models.large) == 2  # the weights as they came, and packed

    fetched = client(models, FETCH, str(tmp_path / "fetched"))
    assert fetched.returncode == 0, fetched.stderr
    directory = Path(fetched.stdout.strip())
    assert files_of(directory) == files_of(out)
    assert read_settings(directory) == read_settings(out)


def test_a_hub_that_refuses_is_one_line_and_the_export_stays(models: hub.Hub, checkpoint: str, tmp_path: Path) -> None:
    models.is_read_only = True
    out = tmp_path / "out"
    done = client(models, EXPORT, checkpoint, str(out), "--sequence-length", "32", "--push-to-hub", "them/it")

    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: push_to_hub='them/it': ")
    assert "403" in line
    assert line.endswith(f"the export is in {out}, upload it later with hf upload them/it {out}")
    assert read_settings(out) is not None
