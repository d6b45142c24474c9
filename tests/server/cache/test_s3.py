"""Entries in a bucket, over s3fs and HTTP: what the cache's commands and a start do with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from neuronserve.server.cache import prune
from neuronserve.server.cache.cache import Cache
from neuronserve.server.cache.manifest import Damaged, describe
from neuronserve.server.cache.places import places
from neuronserve.server.cache.store import Store
from neuronserve.server.cli import main
from tests.tools import s3

from .samples import ABOUT, FILES, key, read_files

URL = "s3://graphs/of/us"


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Bucket]:
    with s3.served(monkeypatch) as bucket:
        yield bucket


@pytest.fixture
def machine(tmp_path: Path) -> Callable[[str], Cache]:
    """`machine(name)`: a cache with a mirror of its own, and the bucket as the classic variable names it."""
    environ = {"NEURON_COMPILE_CACHE_URL": URL}
    return lambda name: Cache(places(environ, str(tmp_path / name)))


def test_what_one_machine_made_another_finds(
    bucket: s3.Bucket, machine: Callable[[str], Cache], graphs: Path, tmp_path: Path
) -> None:
    lines = machine("one").keep(key(), graphs, ABOUT)
    assert [line.rpartition(" ")[2] for line in lines] == [str(tmp_path / "one"), f"{URL}/neuronserve"]
    assert f"of/us/neuronserve/v1/manifests/{key().name}.json" in bucket.objects

    brought = machine("two").bring(key(), tmp_path / "work")
    assert brought.found
    assert brought.line.endswith(f"from {URL}/neuronserve: 3 files, {sum(map(len, FILES.values()))} bytes")
    assert read_files(tmp_path / "work") == FILES


def test_damage_is_set_aside_and_healed(
    bucket: s3.Bucket, machine: Callable[[str], Cache], graphs: Path, tmp_path: Path
) -> None:
    machine("one").keep(key(), graphs, ABOUT)
    for name in bucket.objects:
        if "/blobs/" in name:
            bucket.objects[name] = b"rot"

    assert "its entry is damaged" in machine("two").bring(key(), tmp_path / "work").line
    assert any("/quarantine/" in name for name in bucket.objects)
    machine("one").keep(key(), graphs, ABOUT)
    assert machine("two").bring(key(), tmp_path / "work").found


def test_a_bucket_that_may_not_be_written_costs_one_line(
    bucket: s3.Bucket, machine: Callable[[str], Cache], graphs: Path, tmp_path: Path
) -> None:
    bucket.is_read_only = True
    kept, not_kept = machine("one").keep(key(), graphs, ABOUT)
    assert kept.endswith(f"are kept in {tmp_path}/one")
    assert not_kept.startswith(f"compiled graphs were not kept: {URL}/neuronserve: PermissionError: ")
    assert bucket.objects == {}


def test_pushed_listed_pulled_and_pruned(
    bucket: s3.Bucket, graphs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = describe(graphs, key(), ABOUT)
    Store(str(tmp_path / "mirror")).publish(manifest, graphs)
    for verb, artifacts, said in (
        ("push", "mirror", "11.7 KiB copied"),
        ("push", "mirror", "is there already"),
        ("list", "mirror", f"1 entry, 11.7 KiB, in {URL}"),
        ("pull", "other", "11.7 KiB copied"),
    ):
        assert main(["cache", verb, URL, "--artifacts", str(tmp_path / artifacts)]) == 0
        assert said in capsys.readouterr().out
    Store(str(tmp_path / "other")).verify(manifest)

    assert main(["cache", "prune", URL, "--max-size", "0"]) == 0
    assert bucket.objects == {}


def test_what_was_set_aside_goes(bucket: s3.Bucket, graphs: Path) -> None:
    store = Store(URL)
    store.publish(describe(graphs, key(), ABOUT), graphs)
    store.set_aside(key().name, Damaged("a test"))
    assert store.names() == []
    prune.apply(store, prune.plan(store, datetime.now(UTC)))
    assert not any("/quarantine/" in name for name in bucket.objects)
