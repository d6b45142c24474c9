"""One place that holds entries, behind any fsspec URL: a directory, a bucket, a hub repository.

    v1/manifests/<name>.json     an entry: it is there once this file is, and then it is complete
    v1/blobs/<aa>/<sha256>       files of entries, named by their content
    v1/quarantine/               what was damaged, for a person to look at; `prune` empties it

Blobs are written first and the manifest last, each of them whole or not at all, so any number of writers and readers
may be at work. Every byte is compared with its digest while it is read. Knows neither keys' meaning nor devices.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from neuronserve.neuron_worker.errors import ConfigError

from .errors import CacheUnavailable
from .manifest import CHUNK, Damaged, FileRecord, Manifest

logger = logging.getLogger(__name__)

LAYOUT = "v1"
TEMPORARY = ".part-"
EXTRAS = {"s3fs": "s3"}
"""Package of a file system -> the extra that brings it."""


class Store:
    def __init__(self, url: str) -> None:
        self.url = url
        self._fs, root = _opened(url)
        self._place, self._root = root, f"{root.rstrip('/')}/{LAYOUT}"

    # -- reading

    @property
    def is_a_file(self) -> bool:
        """A place of entries is a directory, or nothing yet."""
        with self._talking():
            return bool(self._fs.isfile(self._place))

    def names(self) -> list[str]:
        return [name.removesuffix(".json") for name in self._listed("manifests") if name.endswith(".json")]

    def find(self, name: str) -> Manifest | None:
        """None: no such entry. Raises `Damaged`."""
        with self._talking():
            try:
                return Manifest.from_bytes(self._fs.cat_file(self._manifest(name)), name)
            except FileNotFoundError:
                return None

    def manifests(self) -> tuple[list[Manifest], dict[str, Damaged]]:
        """(what can be read, what cannot)"""
        found, damaged = [], {}
        for name in self.names():
            try:
                manifest = self.find(name)
            except Damaged as error:
                damaged[name] = error
            else:
                found += [manifest] if manifest is not None else []  # None: removed meanwhile
        return found, damaged

    def fetch(self, manifest: Manifest, directory: Path) -> None:
        """An entry's files into an empty directory. Raises `Damaged`: what is in the directory is then worthless."""
        with self._talking():
            for file in manifest.files:
                target = directory / file.path
                target.parent.mkdir(parents=True, exist_ok=True)
                self._fetch_blob(file, target)

    def verify(self, manifest: Manifest) -> None:
        """Every byte of an entry's files is read and compared. Raises `Damaged`."""
        with self._talking():
            for file in manifest.files:
                for _ in self._chunks(file):
                    pass

    def _fetch_blob(self, file: FileRecord, target: Path) -> None:
        with target.open("wb") as sink:
            for chunk in self._chunks(file):
                sink.write(chunk)

    def _chunks(self, file: FileRecord) -> Iterator[bytes]:
        """Of its blob; after the last one `Damaged` is raised where they were not what was written."""
        digest, size = hashlib.sha256(), 0
        try:
            with self._fs.open(self._blob(file.sha256), "rb") as source:
                while chunk := source.read(CHUNK):
                    digest.update(chunk)
                    size += len(chunk)
                    yield chunk
        except FileNotFoundError:
            raise Damaged(f"its file {file.path} is missing") from None
        if size != file.size:
            raise Damaged(f"its file {file.path} has {size} bytes instead of {file.size}", file.sha256)
        if digest.hexdigest() != file.sha256:
            raise Damaged(f"its file {file.path} is not what was written", file.sha256)

    # -- writing

    def publish(self, manifest: Manifest, directory: Path) -> None:
        """Blobs are written even where they are there already: that heals damaged ones, and disturbs no reader."""
        with self._talking():
            for digest, path in {file.sha256: file.path for file in manifest.files}.items():
                self._put(self._blob(digest), directory / path)
            self._put(self._manifest(manifest.name), manifest.to_bytes())

    def set_aside(self, name: str, damage: Damaged) -> None:
        """An entry, and the file at fault, out of the way; where that is not allowed it stays and is passed over."""
        moved = [self._manifest(name)] + ([self._blob(damage.blob)] if damage.blob else [])
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
        try:
            with self._talking():
                self._make_folder(self._path("quarantine"))
                for path in moved:
                    goal = f"{os.path.basename(path)}.{stamp}-{uuid.uuid4().hex[:8]}"
                    try:
                        self._fs.mv(path, self._path("quarantine", goal))
                    except FileNotFoundError:
                        continue  # another reader was here first
        except CacheUnavailable as error:
            logger.warning("entry %s is damaged (%s) and passed over; it cannot be set aside: %s", name, damage, error)
        else:
            logger.warning("entry %s of %s is damaged (%s): set aside, not loaded", name, self.url, damage)

    def remove(self, name: str) -> None:
        """The entry; its blobs stay for `blobs` to be looked through."""
        with self._talking():
            self._remove(self._manifest(name))

    # -- what `prune` needs

    def blobs(self) -> dict[str, tuple[int, datetime | None]]:
        """Digest -> (bytes, when it was written, where the place knows)."""
        found = {}
        for folder in self._listed("blobs"):
            for name in self._listed("blobs", folder):
                found[name] = self._facts(self._path("blobs", folder, name))
        return found

    def remove_blob(self, digest: str) -> None:
        with self._talking():
            self._remove(self._path("blobs", digest[:2], digest))

    def quarantined(self) -> list[str]:
        return self._listed("quarantine")

    def remove_quarantined(self, name: str) -> None:
        with self._talking():
            self._remove(self._path("quarantine", name))

    # -- the file system

    def _path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))

    def _manifest(self, name: str) -> str:
        return self._path("manifests", f"{name}.json")

    def _blob(self, digest: str) -> str:
        return self._path("blobs", digest[:2], digest)

    def _listed(self, *parts: str) -> list[str]:
        with self._talking():
            self._fs.invalidate_cache()  # other machines write here too
            try:
                paths = self._fs.ls(self._path(*parts), detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def _facts(self, path: str) -> tuple[int, datetime | None]:
        with self._talking():
            try:
                size = int(self._fs.info(path)["size"] or 0)
                when = self._fs.modified(path)
            except (FileNotFoundError, NotImplementedError):
                return 0, None
        return size, when if when.tzinfo else when.replace(tzinfo=UTC)

    def _put(self, path: str, content: bytes | Path) -> None:
        """Whole or not at all: a rename here; an object store does it by itself."""
        if not isinstance(self._fs, LocalFileSystem):
            if isinstance(content, bytes):
                self._fs.pipe_file(path, content)
            else:
                self._fs.put_file(str(content), path)
            return
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{TEMPORARY}{uuid.uuid4().hex}")
        try:
            with part.open("wb") as sink:
                if isinstance(content, bytes):
                    sink.write(content)
                else:
                    with content.open("rb") as source:
                        shutil.copyfileobj(source, sink, CHUNK)
                sink.flush()
                os.fsync(sink.fileno())  # before the rename, or a crash could leave an empty file under the final name
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def _make_folder(self, path: str) -> None:
        if isinstance(self._fs, LocalFileSystem):
            Path(path).mkdir(parents=True, exist_ok=True)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._fs.rm_file(path)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        """The one boundary to file systems: their errors have no common base."""
        try:
            yield
        except (Damaged, CacheUnavailable):
            raise
        except Exception as error:
            raise CacheUnavailable(self.url, error) from error


def check_url(key: str, url: str) -> None:
    """Refuse what no file system answers to. Opens no connection."""
    try:
        fsspec.get_filesystem_class(fsspec.utils.get_protocol(url))
    except ImportError as error:
        missing = str(getattr(error, "name", None) or error)
        package = next((name for name in EXTRAS if name in f"{missing} {error.__cause__ or ''} {error}"), None)
        remedy = f"pip install 'neuronserve[{EXTRAS[package]}]' brings {package}" if package else f"install it: {error}"
        raise ConfigError(f"{key}={url!r}: a package that reads such URLs is missing; {remedy}") from None
    except ValueError as error:
        raise ConfigError(f"{key}={url!r}: {error}; use a directory, s3://bucket/folder or hf://owner/name") from None


def _opened(url: str) -> tuple[Any, str]:
    check_url("cache URL", url)
    try:
        fs, root = fsspec.core.url_to_fs(url)
    except Exception as error:
        raise CacheUnavailable(url, error) from error
    return fs, str(root)
