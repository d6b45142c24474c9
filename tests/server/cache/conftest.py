"""Keys, files and stores for the tests of this folder."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from neuronserve.server.cache.store import Store

from .samples import write_files


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place, once on disk and once in fsspec's memory."""
    if request.param == "file":
        return f"file://{tmp_path}/store"
    return f"memory://{uuid.uuid4().hex}/store"


@pytest.fixture
def store(url: str) -> Store:
    return Store(url)


@pytest.fixture
def graphs(tmp_path: Path) -> Path:
    """A directory as a device leaves it."""
    return write_files(tmp_path / "graphs")


@pytest.fixture
def spoil() -> Callable[[Store, str, bytes | None], None]:
    """`spoil(store, part of a path, content)`: every file of the store with that part; None removes it."""

    def change(store: Store, part: str, content: bytes | None) -> None:
        fs, root = fsspec.core.url_to_fs(store.url)
        paths = [path for path in fs.find(root) if part in path]
        assert paths
        for path in paths:
            if content is None:
                fs.rm_file(path)
            else:
                fs.pipe_file(path, content)

    return change
