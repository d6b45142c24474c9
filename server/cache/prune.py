"""What a store can do without: entries that are old or too many, files of no entry, and what was set aside.

    plan(store, …) ──▶ Pruning ──▶ apply(store, pruning)

A file that belongs to no entry may belong to one that is being written: it is left alone for an hour.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from .manifest import Manifest
from .store import Store

BEING_WRITTEN = timedelta(hours=1)
_AGES = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
_SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True)
class Pruning:
    """What goes. Bytes are those of blobs that no remaining entry needs."""

    entries: tuple[Manifest, ...]
    blobs: tuple[str, ...]
    quarantined: tuple[str, ...]
    num_bytes: int
    kept: tuple[Manifest, ...]


def plan(store: Store, now: datetime, older_than: timedelta | None = None, max_size: int | None = None) -> Pruning:
    """Entries by the time they were made: the oldest go first."""
    manifests = sorted(store.manifests()[0], key=lambda each: (each.made, each.name))
    kept = [each for each in manifests if older_than is None or now - each.made <= older_than]
    while max_size is not None and _size(kept) > max_size:
        kept = kept[1:]
    blobs = store.blobs()
    needed = {file.sha256 for each in kept for file in each.files}
    of_entries = {file.sha256 for each in manifests for file in each.files}
    gone = [
        digest
        for digest, (_, written) in blobs.items()
        if digest not in needed and (digest in of_entries or (written is not None and now - written > BEING_WRITTEN))
    ]
    return Pruning(
        entries=tuple(each for each in manifests if each not in kept),
        blobs=tuple(gone),
        quarantined=tuple(store.quarantined()),
        num_bytes=sum(blobs[digest][0] for digest in gone),
        kept=tuple(kept),
    )


def apply(store: Store, pruning: Pruning) -> None:
    """Entries first: one whose files are gone would be found damaged."""
    for manifest in pruning.entries:
        store.remove(manifest.name)
    for digest in pruning.blobs:
        store.remove_blob(digest)
    for name in pruning.quarantined:
        store.remove_quarantined(name)


def _size(manifests: list[Manifest]) -> int:
    """Files that several entries have are there once."""
    return sum({file.sha256: file.size for each in manifests for file in each.files}.values())


def age(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+)([mhdw])", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no age; write 12h, 30d or 4w")
    try:
        return timedelta(**{_AGES[match[2]]: int(match[1])})
    except OverflowError:
        raise ValueError(f"{text!r} is longer than anything was kept; write 12h, 30d or 4w") from None


def size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no size; write 500M or 20G")
    try:
        return int(float(match[1]) * _SIZES[match[2]])
    except OverflowError:
        raise ValueError(f"{text!r} is more than any disk holds; write 500M or 20G") from None


def remove_directory(directory: Path) -> None:
    """What a killed server left behind."""
    shutil.rmtree(directory, ignore_errors=True)
