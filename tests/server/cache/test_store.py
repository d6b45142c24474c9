"""Entries of a store: published whole, verified when read, set aside when damaged, by any number of writers."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server.cache.errors import CacheUnavailable
from neuronserve.server.cache.manifest import Damaged, FileRecord, describe
from neuronserve.server.cache.store import Store, check_url
from tests.tools.s3 import without_s3fs

from .samples import ABOUT, FILES, key, read_files, write_files

Spoil = Callable[[Store, str, bytes | None], None]
ROUNDS = 25


def publish(store: Store, graphs: Path) -> str:
    manifest = describe(graphs, key(), ABOUT)
    store.publish(manifest, graphs)
    return manifest.name


def fetched(store: Store, name: str, directory: Path) -> dict[str, bytes]:
    manifest = store.find(name)
    assert manifest is not None
    store.fetch(manifest, directory)
    return read_files(directory)


def test_what_was_published_comes_back(store: Store, graphs: Path, tmp_path: Path) -> None:
    name = publish(store, graphs)

    assert fetched(store, name, tmp_path / "back") == FILES
    assert store.names() == [name]


def test_the_manifest_says_the_key_in_plain_words(store: Store, graphs: Path) -> None:
    name = publish(store, graphs)
    fs, root = fsspec.core.url_to_fs(store.url)
    written = json.loads(fs.cat_file(f"{root}/v1/manifests/{name}.json"))

    assert written["key"]["compiler"] == "neuronx-cc 2.20"
    assert written["about"] == ABOUT
    assert {file["path"]: file["size"] for file in written["files"]} == {n: len(c) for n, c in FILES.items()}


def test_an_empty_place_has_no_entries(store: Store) -> None:
    assert (store.names(), store.find("0" * 32), store.blobs(), store.quarantined()) == ([], None, {}, [])


def test_what_a_compiler_leaves_behind_is_no_part_of_an_entry(store: Store, graphs: Path) -> None:
    (graphs / "library" / "model.lock").touch()
    manifest = describe(graphs, key(), ABOUT)
    assert {file.path for file in manifest.files} == set(FILES)


def test_files_of_the_same_content_are_there_once(store: Store, tmp_path: Path) -> None:
    graphs = write_files(tmp_path / "twins", {"a": b"same", "b": b"same"})
    name = publish(store, graphs)
    assert len(store.blobs()) == 1
    assert fetched(store, name, tmp_path / "back") == {"a": b"same", "b": b"same"}


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("/manifests/", b"", "cannot be read"),
        ("/manifests/", b"{half", "cannot be read"),
        ("/manifests/", b"[]", "cannot be read"),
        ("/manifests/", b'{"checksum": 1, "key": {}, "files": [], "created": "", "about": {}}', "cannot be read"),
        ("/blobs/", b"first grapH", "not what was written|bytes instead of"),
        ("/blobs/", b"short", "bytes instead of"),
        ("/blobs/", b"", "bytes instead of"),
        ("/blobs/", None, "is missing"),
    ],
)
def test_a_damaged_file_is_never_loaded(
    store: Store, graphs: Path, tmp_path: Path, spoil: Spoil, part: str, content: bytes | None, message: str
) -> None:
    name = publish(store, graphs)
    spoil(store, part, content)

    with pytest.raises(Damaged, match=message) as damage:
        fetched(store, name, tmp_path / "back")
    store.set_aside(name, damage.value)
    assert store.find(name) is None
    assert any(each.startswith(name) for each in store.quarantined())

    publish(store, graphs)  # rebuilt
    assert fetched(store, name, tmp_path / "again") == FILES


def test_one_changed_value_in_a_manifest_is_noticed(store: Store, graphs: Path, spoil: Spoil) -> None:
    name = publish(store, graphs)
    fs, root = fsspec.core.url_to_fs(store.url)
    text = fs.cat_file(f"{root}/v1/manifests/{name}.json")
    for old, new in ((b'"size": 11', b'"size": 12'), (b"neuronx-cc 2.20", b"neuronx-cc 2.21"), (b"a.neff", b"c.neff")):
        assert text.count(old) == 1
        spoil(store, "/manifests/", text.replace(old, new))
        with pytest.raises(Damaged, match="not what was written"):
            store.find(name)


def test_a_manifest_under_another_name_is_damaged(store: Store, graphs: Path) -> None:
    name = publish(store, graphs)
    fs, root = fsspec.core.url_to_fs(store.url)
    fs.cp_file(f"{root}/v1/manifests/{name}.json", f"{root}/v1/manifests/{'0' * 32}.json")
    with pytest.raises(Damaged, match=f"is that of {name}"):
        store.find("0" * 32)


@pytest.mark.parametrize("path", ["../out", "/etc/out", "a/../../out", "", "a\\..\\out"])
def test_a_path_that_leads_out_of_the_directory_is_damage(store: Store, graphs: Path, path: str) -> None:
    manifest = describe(graphs, key(), ABOUT)
    evil = replace(manifest, files=(FileRecord(path, 11, manifest.files[0].sha256),))
    fs, root = fsspec.core.url_to_fs(store.url)
    fs.makedirs(f"{root}/v1/manifests", exist_ok=True)
    fs.pipe_file(f"{root}/v1/manifests/{evil.name}.json", evil.to_bytes())
    with pytest.raises(Damaged, match="outside its directory"):
        store.find(evil.name)


def test_a_damaged_entry_of_a_read_only_store_stays_and_is_said(
    store: Store, graphs: Path, spoil: Spoil, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = publish(store, graphs)
    spoil(store, "/manifests/", b"")

    def refuse(*arguments: object, **more: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(type(store._fs), "mv", refuse)
    store.set_aside(name, Damaged("its manifest cannot be read"))
    assert store.names() == [name]
    assert "passed over; it cannot be set aside" in caplog.text


def write_many(url: str, name: str) -> None:
    """Two processes with the same key and other bytes, as a compiler that is not deterministic gives."""
    graphs = Path(name)
    for number in range(ROUNDS):
        write_files(graphs, {"graph": name.encode() * 5000 + bytes([number]), "common": b"both"})
        manifest = describe(graphs, key(), {"model": name})
        Store(url).publish(manifest, graphs)


def test_two_writers_at_once_and_a_reader_who_never_sees_half(tmp_path: Path) -> None:
    url, name = str(tmp_path / "store"), key().name
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=write_many, args=(url, str(tmp_path / who))) for who in ("one", "two")]
    for writer in writers:
        writer.start()
    num_reads = 0
    while any(writer.is_alive() for writer in writers) or num_reads == 0:
        manifest = Store(url).find(name)
        if manifest is not None:
            Store(url).fetch(manifest, tmp_path / "read")  # raises where a byte is not its writer's
            num_reads += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert Store(url).names() == [name]
    assert not list((tmp_path / "store").rglob(".part-*"))


def test_a_writer_that_fails_leaves_no_entry(graphs: Path, tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    manifest = describe(graphs, key(), ABOUT)
    (graphs / manifest.files[-1].path).unlink()
    with pytest.raises(CacheUnavailable):
        store.publish(manifest, graphs)
    assert store.names() == []


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nosuch://place", "Protocol not known.*use a directory, s3://"),
        ("s3://bucket/folder", r"pip install 'neuronserve\[s3\]' brings s3fs"),
    ],
)
def test_urls_that_nothing_here_reads(url: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    without_s3fs(monkeypatch)
    with pytest.raises(ConfigError, match=f"cache_url='{url}': .*{message}"):
        check_url("cache_url", url)


@pytest.mark.parametrize(
    "url", ["/a/directory", "file:///a", "memory://a", "s3://bucket/folder", "hf://owner/name/neuronserve"]
)
def test_urls_that_are_read(url: str) -> None:
    check_url("cache_url", url)


def test_a_file_where_the_store_should_be(tmp_path: Path, graphs: Path) -> None:
    (tmp_path / "file").touch()
    store = Store(str(tmp_path / "file"))
    with pytest.raises(CacheUnavailable, match=r"NotADirectoryError|FileExistsError"):
        publish(store, graphs)
