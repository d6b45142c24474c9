"""What goes by age and by size, what stays because somebody may be writing it, and that a dry run touches nothing."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from neuronserve.server.cache import prune
from neuronserve.server.cache.manifest import Damaged, describe
from neuronserve.server.cache.store import Store

from .samples import ABOUT, key, write_files

NOW = datetime(2026, 6, 30, tzinfo=UTC)


def add(store: Store, folder: Path, number: int, days: int, content: bytes) -> str:
    graphs = write_files(folder / str(number), {"graph": content, "common": b"in all"})
    manifest = describe(graphs, key(max_num_seqs=number), ABOUT)
    manifest = replace(manifest, created=(NOW - timedelta(days=days)).isoformat())
    store.publish(manifest, graphs)
    return manifest.name


@pytest.fixture
def names(store: Store, tmp_path: Path) -> list[str]:
    """Entries of 1000 bytes, and 6 that they share: 40, 20 and 2 days old."""
    return [add(store, tmp_path, number, days, bytes([number]) * 1000) for number, days in ((1, 40), (2, 20), (3, 2))]


@pytest.mark.parametrize(
    ("older_than", "max_size", "gone"),
    [
        (None, None, 0),
        ("30d", None, 1),
        ("2w", None, 2),
        ("1h", None, 3),
        (None, "1G", 0),
        (None, "2500", 1),
        (None, "2006", 1),
        (None, "2005", 2),
        (None, "0", 3),
        ("30d", "1500", 2),
    ],
)
def test_the_oldest_go(store: Store, names: list[str], older_than: str | None, max_size: str | None, gone: int) -> None:
    pruning = prune.plan(
        store, NOW, prune.age(older_than) if older_than else None, prune.size(max_size) if max_size else None
    )
    assert [entry.name for entry in pruning.entries] == names[:gone]
    assert pruning.num_bytes == 1000 * gone + (6 if gone == 3 else 0)
    assert sorted(store.names()) == sorted(names)  # a plan touches nothing

    prune.apply(store, pruning)
    assert sorted(store.names()) == sorted(names[gone:])
    assert len(store.blobs()) == (3 - gone + 1 if gone < 3 else 0)


def test_what_was_set_aside_goes(store: Store, names: list[str]) -> None:
    store.set_aside(names[0], Damaged("a test"))
    prune.apply(store, prune.plan(store, NOW))
    assert store.quarantined() == []


def test_a_file_of_no_entry_stays_for_an_hour(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    store.remove(add(store, tmp_path, 1, 0, b"orphan"))
    [blob] = [path for path in (tmp_path / "store").rglob("blobs/*/*") if path.read_bytes() == b"orphan"]

    prune.apply(store, prune.plan(store, datetime.now(UTC)))
    assert blob.exists()
    before = time.time() - 7200
    os.utime(blob, (before, before))
    prune.apply(store, prune.plan(store, datetime.now(UTC)))
    assert not blob.exists()


@pytest.mark.parametrize("text", ["30", "d", "3y", "-1d", "", "99999999999d"])
def test_what_is_no_age(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no age|is longer than anything was kept"):
        prune.age(text)


@pytest.mark.parametrize(("text", "expected"), [("5", 5), ("2K", 2048), ("1.5G", 3 << 29), ("1GiB", 1 << 30)])
def test_sizes(text: str, expected: int) -> None:
    assert prune.size(text) == expected


@pytest.mark.parametrize("text", ["", "G", "1X", "-5"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        prune.size(text)
