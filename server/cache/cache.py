"""Artifacts by key: from the export that is served, else from this machine's directory, else from the shared place,
else the reason why there are none.

    bring(key, directory) ──▶ Brought(found, line)      the local mirror is always asked first, and may be all there is
    keep(key, directory, about) ──▶ lines               what was made: into the mirror, then to the shared place

A place that fails costs a line in the log and nothing else: compiling is slow, not wrong.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import CacheUnavailable
from .explain import miss
from .key import ArtifactKey
from .manifest import Damaged, Manifest, describe
from .places import Places
from .store import Store


@dataclass(frozen=True)
class Brought:
    found: bool
    lines: tuple[str, ...]  # for the log; the last one says what was found, or why nothing was

    @property
    def line(self) -> str:
        return self.lines[-1]


class Cache:
    def __init__(self, places: Places) -> None:
        self.places = places

    def bring(self, key: ArtifactKey, directory: Path) -> Brought:
        """The key's files into `directory`, which is made empty first."""
        lines: list[str] = []
        seen: list[Manifest] = []
        damages: list[str] = []
        export = [] if self.places.export is None else [self.places.export]
        for url in (asked := [*export, *self._urls]):
            _empty(directory)
            try:
                store = Store(url)
                found = _verified(store, key.name, directory, sets_aside=url not in export)
                if found is None:
                    seen += store.manifests()[0]
                    continue
            except Damaged as damage:
                damages.append(str(damage))
                continue
            except CacheUnavailable as error:
                lines.append(f"not looked up: {error}")
                continue
            if url in self._urls[1:]:
                lines += self._write(self._urls[0], found, directory)
            lines.append(f"compiled graphs {key.name} from {url}: {len(found.files)} files, {found.size} bytes")
            return Brought(True, tuple(lines))
        _empty(directory)
        lines.append(miss(key, " and ".join(asked), seen, damages))
        return Brought(False, tuple(lines))

    def keep(self, key: ArtifactKey, directory: Path, about: Mapping[str, str]) -> list[str]:
        """What is in `directory`, under this key. What is there already is left alone."""
        manifest = describe(directory, key, about)
        if not manifest.files:
            return []
        lines = []
        for url in self._urls[: 2 if self.places.writes_remote else 1]:
            if not _holds(url, manifest):
                lines += self._write(url, manifest, directory) or [f"compiled graphs {key.name} are kept in {url}"]
        return lines

    @property
    def _urls(self) -> list[str]:
        found = [self.places.local, self.places.remote]
        return [str(place) for place in found if place is not None]

    def _write(self, url: str, manifest: Manifest, directory: Path) -> list[str]:
        try:
            Store(url).publish(manifest, directory)
        except CacheUnavailable as error:
            return [f"compiled graphs were not kept: {error}"]
        return []


def _verified(store: Store, name: str, directory: Path, *, sets_aside: bool) -> Manifest | None:
    """The entry, every byte of it compared. A damaged one is set aside, or left where it is, and `Damaged` raised."""
    try:
        manifest = store.find(name)
        if manifest is not None:
            store.fetch(manifest, directory)
    except Damaged as damage:
        if sets_aside:
            store.set_aside(name, damage)
        raise
    return manifest


def _holds(url: str, manifest: Manifest) -> bool:
    """Whether the same files are there under this name. A device that compiled something else replaces them."""
    try:
        found = Store(url).find(manifest.name)
    except (Damaged, CacheUnavailable):
        return False
    return found is not None and found.files == manifest.files


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
