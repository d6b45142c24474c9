"""`neuronserve.json`: what an export of ours holds, file by file, and which of its files a device loads as they are.

Written by the export, read by whoever opens one of the files: `check` compares a file with what was written before
anything of it is used. Imports numpy alone; knows no model and no device.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import checksum
from .errors import LoadError

MANIFEST = "neuronserve.json"
FORMAT = 1


@dataclass(frozen=True)
class FileEntry:
    bytes: int
    digest: str


@dataclass(frozen=True)
class PackedEntry:
    """Weights in a device's own layout. They are what `key` says, and of use where everything in it is the same."""

    file: str
    key: Mapping[str, Any]


@dataclass(frozen=True)
class Manifest:
    version: str  # of this package
    backend: str
    quantization: str | None
    quantize_head: bool
    files: Mapping[str, FileEntry]  # by path inside the export, with "/"
    packed: Sequence[PackedEntry] = ()
    shapes: Sequence[Mapping[str, int]] = ()  # of the plan

    @classmethod
    def read(cls, directory: str | Path) -> Manifest | None:
        """None: no export of ours."""
        path = Path(directory) / MANIFEST
        if not path.is_file():
            return None
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            version, checked_by = values.pop("format"), values.pop("checksum")
            files = {str(name): FileEntry(**entry) for name, entry in values.pop("files").items()}
            packed = [PackedEntry(**entry) for entry in values.pop("packed")]
            found = cls(files=files, packed=packed, **values) if version == FORMAT else None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise LoadError(f"{path} is damaged ({error!r}); export or download the model again") from None
        if found is None or checked_by != checksum.NAME:
            raise LoadError(
                f"{path} has format {version} with checksum {checked_by}, this version reads format {FORMAT} with "
                f"{checksum.NAME}; export the model again"
            )
        return found

    def write(self, directory: Path) -> None:
        values = {"format": FORMAT, "checksum": checksum.NAME, **asdict(self)}
        (directory / MANIFEST).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

    def check(self, directory: str | Path, names: Iterable[str]) -> None:
        """Every one of these files is as it was written, or `LoadError`."""
        for name in names:
            self.check_data(directory, name, checksum.mapped(Path(directory) / name))

    def check_data(
        self,
        directory: str | Path,
        name: str,
        data: NDArray[np.uint8],
        taken: checksum.Taken | None = None,
    ) -> None:
        """`data` is what the file held when it was written. `taken`: see `checksum.digest`."""
        path, entry = Path(directory) / name, self.files.get(name)
        if entry is None:
            raise LoadError(f"{path} is not among the files of {MANIFEST}; {_REMEDY}")
        if len(data) != entry.bytes:
            raise LoadError(f"{path} is damaged: {len(data)} bytes, {entry.bytes} were written; {_REMEDY}")
        if checksum.digest(data, taken) != entry.digest:
            raise LoadError(f"{path} is damaged: its checksum is not the one in {MANIFEST}; {_REMEDY}")

    @property
    def plain_weights(self) -> list[str]:
        """The checkpoint's own files."""
        return [name for name in self.files if name.endswith(".safetensors") and "/" not in name]


_REMEDY = "export or download the model again"


def entry_of(path: Path) -> FileEntry:
    data = checksum.mapped(path)
    return FileEntry(len(data), checksum.digest(data))
