"""What an entry consists of: its key in plain words, and size and digest of every file.

A manifest is believed only if its own digest is right, its key gives its name, and no path leads out of a directory:
a store may be damaged, and may be somebody else's.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from .key import ArtifactKey, canonical

CHUNK = 1 << 20
IGNORED_SUFFIXES = (".lock", ".tmp")
"""Of files that a compiler or library leaves behind while it works."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class Damaged(Exception):
    """An entry that must not be loaded; the message says what is wrong with it. `blob`: the file at fault."""

    def __init__(self, message: str, blob: str | None = None) -> None:
        super().__init__(message)
        self.blob = blob


@dataclass(frozen=True)
class FileRecord:
    path: str  # relative, with forward slashes
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    key: ArtifactKey
    files: tuple[FileRecord, ...]
    created: str  # ISO 8601, UTC
    about: Mapping[str, str] = field(default_factory=dict)  # for people: the model's name, who made it

    @property
    def name(self) -> str:
        return self.key.name

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def made(self) -> datetime:
        return datetime.fromisoformat(self.created)

    def to_bytes(self) -> bytes:
        values = {
            "key": self.key.to_json(),
            "files": [asdict(file) for file in self.files],
            "created": self.created,
            "about": dict(self.about),
        }
        return json.dumps({**values, "checksum": _checksum(values)}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, text: bytes, name: str) -> Manifest:
        """Raises `Damaged`."""
        try:
            values = json.loads(text)
            checksum = values.pop("checksum")
            manifest = cls(
                key=ArtifactKey.from_json(values["key"]),
                files=tuple(FileRecord(**file) for file in values["files"]),
                created=values["created"],
                about=values["about"],
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(f"its manifest cannot be read ({type(error).__name__}: {error})") from None
        if checksum != _checksum(values):
            raise Damaged("its manifest is not what was written")
        if manifest.name != name:
            raise Damaged(f"its manifest is that of {manifest.name}")
        for file in manifest.files:
            _check(file)
        return manifest


def describe(directory: Path, key: ArtifactKey, about: Mapping[str, str]) -> Manifest:
    """The manifest of what lies in a directory."""
    paths = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.suffix not in IGNORED_SUFFIXES)
    files = tuple(
        FileRecord(path.relative_to(directory).as_posix(), path.stat().st_size, file_digest(path)) for path in paths
    )
    return Manifest(key, files, datetime.now(UTC).isoformat(timespec="seconds"), about)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical(values)).hexdigest()


def _check(file: FileRecord) -> None:
    path = PurePosixPath(file.path)
    if not path.parts or path.is_absolute() or ".." in path.parts or "\\" in file.path or "\0" in file.path:
        raise Damaged(f"its file {file.path!r} would lie outside its directory")
    if not _DIGEST.fullmatch(file.sha256):
        raise Damaged(f"its file {file.path!r} has no digest")
