"""`neuronserve cache …` as a person runs it, and optimum's lookup."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest

from neuronserve.server.cache import optimum
from neuronserve.server.cache.manifest import describe
from neuronserve.server.cache.store import Store
from neuronserve.server.cli import main
from tests.neuron_worker.tiny_model import tiny_model
from tests.tools import s3

from .samples import ABOUT, FILES, key, read_files, write_files

Run = Callable[..., "tuple[int, str]"]
SERVED = ["--neuronserve.backend", "transformers-neuronx", "--max-model-len", "128", "--max-num-seqs", "2"]


@pytest.fixture(autouse=True)
def _no_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "NEURONSERVE_ARTIFACTS", "NEURONSERVE_CACHE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """`run("list", …)` -> (exit status, what was printed), with a mirror at `mirror`."""

    def call(verb: str, *words: str, artifacts: str = "mirror") -> tuple[int, str]:
        status = main(["cache", verb, *words, "--artifacts", str(tmp_path / artifacts)])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return call


def file_digest_of(path: str) -> str:
    return hashlib.sha256(FILES[path]).hexdigest()


def fill(url: str, folder: Path, about: dict[str, str] = ABOUT, **changes: Any) -> str:
    graphs = write_files(folder)
    manifest = describe(graphs, key(**changes), about)
    Store(url).publish(manifest, graphs)
    return manifest.name


def test_entries_are_listed_with_what_tells_them_apart(run: Run, tmp_path: Path) -> None:
    name = fill(str(tmp_path / "mirror"), tmp_path / "graphs")
    status, text = run("list")
    assert status == 0
    assert text.startswith(name)
    assert "org/tiny  bfloat16, 2 cores, 4 x 128, neuronx-cc 2.20\n" in text
    assert f"1 entry, 11.7 KiB, in {tmp_path}/mirror\n" in text
    assert run("list", f"memory://{uuid.uuid4().hex}")[1].startswith("0 entries, 0 B, in memory://")


def test_pushed_and_pulled(run: Run, tmp_path: Path) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    names = [fill(str(tmp_path / "mirror"), tmp_path / "graphs", max_num_seqs=number) for number in (1, 2)]

    status, text = run("push", url, names[0][:6])
    assert (status, text) == (0, f"{names[0]}  11.7 KiB copied\n")
    assert sorted(run("push", url)[1].splitlines()) == sorted(
        [f"{names[0]}  is there already", f"{names[1]}  11.7 KiB copied"]
    )
    assert run("pull", url, artifacts="other")[0] == 0
    other = Store(str(tmp_path / "other"))
    assert sorted(other.names()) == sorted(names)
    manifest = other.find(names[0])
    assert manifest is not None
    other.fetch(manifest, tmp_path / "back")
    assert read_files(tmp_path / "back") == FILES


def at_the_target(url: str, part: str) -> str:
    """The one file of a store whose path has that part."""
    fs, root = fsspec.core.url_to_fs(url)
    [path] = [path for path in fs.find(root) if part in path]
    return str(path)


@pytest.mark.parametrize(
    ("part", "content", "said"),
    [
        (f"/{file_digest_of('library/a.neff')}", b"rot", "its file library/a.neff has 3 bytes instead of 11"),
        (f"/{file_digest_of('library/a.neff')}", b"first grapH", "its file library/a.neff is not what was written"),
        (f"/{file_digest_of('library/a.neff')}", None, "its file library/a.neff is missing"),
        ("/manifests/", b"{half", "its manifest cannot be read"),
    ],
    ids=["cut", "changed", "missing", "manifest"],
)
def test_a_damaged_target_is_written_anew(
    run: Run, tmp_path: Path, part: str, content: bytes | None, said: str
) -> None:
    name, url = fill(str(tmp_path / "mirror"), tmp_path / "graphs"), f"memory://{uuid.uuid4().hex}"
    run("push", url)
    path, memory = at_the_target(url, part), fsspec.filesystem("memory")
    memory.rm_file(path) if content is None else memory.pipe_file(path, content)

    status, text = run("push", url)
    assert status == 0
    assert text.startswith(f"{name}  11.7 KiB copied in the place of a damaged entry: {said}")
    assert run("push", url)[1] == f"{name}  is there already\n"
    assert run("pull", url, artifacts="other")[1] == f"{name}  11.7 KiB copied\n"


def test_other_files_under_the_name_are_replaced(run: Run, tmp_path: Path) -> None:
    name, url = fill(str(tmp_path / "mirror"), tmp_path / "graphs"), f"memory://{uuid.uuid4().hex}"
    outdated = write_files(tmp_path / "outdated", {"library/a.neff": b"of an older package"})
    Store(url).publish(describe(outdated, key(), ABOUT), outdated)

    assert run("push", url) == (0, f"{name}  11.7 KiB copied in the place of 1 other file\n")
    manifest = Store(url).find(name)
    assert manifest is not None
    Store(url).fetch(manifest, tmp_path / "back")
    assert read_files(tmp_path / "back") == FILES


@pytest.mark.parametrize("verb", ["list", "prune", "push", "pull"])
@pytest.mark.parametrize("place", ["path", "file URL", "memory"])
def test_a_file_is_no_place_of_entries(run: Run, tmp_path: Path, verb: str, place: str) -> None:
    (tmp_path / "notes.txt").write_text("of a person")
    memory = f"memory://{uuid.uuid4().hex}/notes.txt"
    fsspec.filesystem("memory").pipe_file(memory, b"of a person")
    url = {"path": f"{tmp_path}/notes.txt", "file URL": f"file://{tmp_path}/notes.txt", "memory": memory}[place]
    assert run(verb, url) == (1, f"error: cache URL={url!r} is a file; name the directory that holds v1/\n")


@pytest.mark.parametrize("verb", ["list", "prune"])
def test_nor_is_a_file_a_mirror(run: Run, tmp_path: Path, verb: str) -> None:
    (tmp_path / "notes.txt").write_text("of a person")
    assert run(verb, artifacts="notes.txt")[1].endswith("notes.txt' is a file; name the directory that holds v1/\n")


def test_a_damaged_entry_is_not_copied(run: Run, tmp_path: Path) -> None:
    name = fill(str(tmp_path / "mirror"), tmp_path / "graphs")
    for blob in (tmp_path / "mirror").rglob("blobs/*/*"):
        blob.write_bytes(b"rot")
    url = f"memory://{uuid.uuid4().hex}"
    status, text = run("push", url)
    assert status == 1
    assert f"{name}  is damaged" in text
    assert Store(url).names() == []


def test_a_name_that_nothing_has(run: Run, tmp_path: Path) -> None:
    status, text = run("push", "memory://x", "abcdef")
    assert status == 1
    assert "begins with 'abcdef'" in text


@pytest.mark.parametrize("verb", ["list", "prune", "push", "pull"])
def test_urls_that_nothing_reads_are_one_line(run: Run, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3.without_s3fs(monkeypatch)
    status, text = run(verb, "s3://bucket/folder")
    assert status == 1
    assert text.startswith("error: cache URL='s3://bucket/folder': ")
    assert "pip install 'neuronserve[s3]'" in text
    assert text.count("\n") == 1


def test_a_lookup_says_what_differs_and_then_finds(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(tmp_path / "model")
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    status, text = run("lookup", "--port", "8000", model, *SERVED)
    assert status == 1
    assert "note: not part of a key: --port" in text
    assert f"{tmp_path}/mirror holds no entry" in text

    from neuronserve.neuron_worker.config import ServeRequest
    from neuronserve.server.cache.wanted import wanted

    options = {"backend": "transformers-neuronx"}
    request = ServeRequest(model, max_model_len=128, max_num_seqs=2, options=options)
    asked, _ = wanted(request, os.environ, str(tmp_path / "mirror"), None)
    graphs = write_files(tmp_path / "graphs")
    older = replace(asked, compiler_flags=())
    Store(str(tmp_path / "mirror")).publish(describe(graphs, older, {"model": "m"}), graphs)
    status, text = run("lookup", model, *SERVED)
    assert status == 1
    assert text.rstrip().endswith('of m, differs: compiler_flags is ["-O1"] here and [] there')

    Store(str(tmp_path / "mirror")).publish(describe(graphs, asked, {"model": "m"}), graphs)
    status, text = run("lookup", model, *SERVED)
    assert status == 0
    assert f"compiled graphs {asked.name} from {tmp_path}/mirror: 3 files" in text


def test_a_lookup_without_s3fs_says_so_and_looks_into_the_mirror(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.without_s3fs(monkeypatch)
    monkeypatch.setenv("NEURON_COMPILE_CACHE_URL", "s3://bucket/cache")
    status, text = run("lookup", tiny_model(tmp_path / "model"), *SERVED)
    assert (status, text.count("s3://")) == (1, 1)
    assert "pip install 'neuronserve[s3]'" in text
    assert f"{tmp_path}/mirror holds no entry" in text


def test_a_device_without_graphs_has_nothing_to_look_up(run: Run, tmp_path: Path) -> None:
    status, text = run("lookup", tiny_model(tmp_path / "model"), "--neuronserve.backend", "cpu")
    assert status == 1
    assert "the cpu device keeps no compiled graphs" in text


def test_a_dry_run_of_prune_touches_nothing(run: Run, tmp_path: Path) -> None:
    name = fill(str(tmp_path / "mirror"), tmp_path / "graphs")
    left_behind = tmp_path / "mirror" / "work" / "dead"
    left_behind.mkdir(parents=True)
    os.utime(left_behind, (time.time() - 2 * 86400,) * 2)
    (tmp_path / "mirror" / "work" / "alive").mkdir()

    status, text = run("prune", "--max-size", "0", "--dry-run")
    assert status == 0
    assert "would remove 1 entry, 3 files of 11.7 KiB, 0 damaged files, 1 abandoned directory; 0 entries stay" in text
    assert Store(str(tmp_path / "mirror")).names() == [name]
    assert left_behind.exists()

    assert "removed 1 entry" in run("prune", "--max-size", "0")[1]
    assert Store(str(tmp_path / "mirror")).blobs() == {}
    assert [path.name for path in (tmp_path / "mirror" / "work").iterdir()] == ["alive"]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--older-than", "soon", "'soon' is no age; write 12h, 30d or 4w"),
        ("--older-than", "99999999999d", "'99999999999d' is longer than anything was kept; write 12h, 30d or 4w"),
        ("--older-than", "9" * 400 + "w", "is longer than anything was kept; write 12h, 30d or 4w"),
        ("--max-size", "much", "'much' is no size; write 500M or 20G"),
        ("--max-size", "9" * 400 + "G", "is more than any disk holds; write 500M or 20G"),
    ],
    ids=["no age", "days", "weeks", "no size", "digits"],
)
def test_ages_and_sizes_that_are_none(run: Run, flag: str, value: str, message: str) -> None:
    status, text = run("prune", flag, value)
    assert status == 1
    assert text.startswith(f"error: {flag}: ")
    assert text.endswith(f"{message}\n")


def test_the_command_is_a_real_process_that_loads_no_engine(tmp_path: Path) -> None:
    name = fill(str(tmp_path / "mirror"), tmp_path / "graphs")
    code = (
        "import sys; from neuronserve.server.cli import main\n"
        f"status = main(['cache', 'list', 'file://{tmp_path}/mirror'])\n"
        "sys.exit(status or any(module in sys.modules for module in ('torch', 'vllm', 'transformers')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(name)


def test_optimum_s_older_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(str(tmp_path / "mirror"), tmp_path / "graphs")
    environ = {"NEURONSERVE_ARTIFACTS": str(tmp_path / "mirror")}
    assert optimum.lookup(["org/tiny"], environ) == 0
    assert capsys.readouterr().out.splitlines() == [
        "",
        "*** 1 entrie(s) found in cache for org/tiny for inference.***",
        "",
        "auto_cast_type: bf16",
        "batch_size: 4",
        "checkpoint_id: org/tiny",
        "compiler_type: neuronx-cc",
        "compiler_version: 2.20",
        "num_cores: 2",
        "sequence_length: 128",
        "task: text-generation",
    ]
    optimum.lookup(["org/other", "--mode", "training"], environ)
    assert capsys.readouterr().out == "\n*** 0 entrie(s) found in cache for org/other for training.***\n"


def test_optimum_s_lookup_finds_what_is_here_though_the_shared_place_is_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    s3.without_s3fs(monkeypatch)
    fill(str(tmp_path / "mirror"), tmp_path / "graphs")
    environ = {"NEURON_COMPILE_CACHE_URL": "s3://bucket/cache", "NEURONSERVE_ARTIFACTS": str(tmp_path / "mirror")}
    assert optimum.lookup(["org/tiny"], environ) == 0
    captured = capsys.readouterr()
    assert "*** 1 entrie(s) found" in captured.out
    assert captured.err.startswith("note: not looked into: cache URL='s3://bucket/cache/neuronserve': ")
    assert captured.err.count("\n") == 1


def test_optimum_s_newer_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(str(tmp_path / "mirror"), tmp_path / "graphs")
    environ = {"NEURONSERVE_ARTIFACTS": str(tmp_path / "mirror")}
    optimum.lookup(["org/tiny", "--instance_type", "inf2", "--dtype", "bf16", "--batch_size", "4"], environ)
    heading, columns, row = capsys.readouterr().out.splitlines()
    assert heading == "Cached entries for org/tiny"
    assert columns.split("  ")[0] == "batch size"
    assert row.split() == ["4", "128", "2", "bfloat16", "inf2,", "trn1"]
    optimum.lookup(["org/tiny", "--tensor_parallel_size", "8"], environ)
    assert capsys.readouterr().out == "No cached entries found for org/tiny.\n"


def test_optimum_s_repository_is_the_hub_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert optimum.lookup(["org/tiny", "--repo_id", "no repository"], {}) == 1
    assert "give owner/name" in capsys.readouterr().err
