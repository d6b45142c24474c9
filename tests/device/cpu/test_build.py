"""The library is compiled where it is wanted, once, and its absence is one readable line."""

from __future__ import annotations

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from neuronserve.neuron_worker.device.cpu import build

pytestmark = pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile quickly: these tests are about files."""
    monkeypatch.setattr(build, "_OPTIONS", ["-std=gnu11", "-O0", "-fPIC", "-ffp-contract=off", "-pthread"])


def test_build_leaves_one_library_and_nothing_else(tmp_path: Path, small: None) -> None:
    stale = tmp_path / "neuronserve_cpu-0000000000000000.so"
    stale.touch()
    library = build.build(tmp_path)
    assert library is not None
    assert [path.name for path in tmp_path.iterdir()] == [library.name] == [build.library_name()]


def test_a_library_that_is_there_is_not_compiled_again(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = build.build(tmp_path)
    monkeypatch.setattr(build, "_run", lambda command: pytest.fail(f"compiled again: {command}"))
    assert build.build(tmp_path) == library


def test_two_builds_at_once_end_with_one_library(tmp_path: Path, small: None) -> None:
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(build.build, [tmp_path, tmp_path])
    assert first == second
    assert len(list(tmp_path.iterdir())) == 1


def test_no_compiler_is_one_line_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with caplog.at_level(logging.WARNING):
        assert build.build(tmp_path) is None
    assert [record.getMessage() for record in caplog.records] == [
        "no C compiler for the CPU kernels; install gcc (Debian: apt-get install gcc libc6-dev)"
    ]


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_OPTIONS", ["-include", "no-such-header.h"])
    monkeypatch.setattr(build, "_cache_dir", lambda: tmp_path)
    with pytest.raises(build.BuildFailed, match=r"no-such-header\.h"):
        build.find()


def test_without_a_packaged_library_the_cache_gets_one(
    tmp_path: Path, small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.find() == tmp_path / "neuronserve" / "kernels" / build.library_name()
