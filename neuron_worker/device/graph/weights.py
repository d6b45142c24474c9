"""A checkpoint's tensors by name, read piecewise: one safetensors file, or shards listed by an index.

What comes out is a `Matrix` (still on disk) or a float32 vector; a packer decides what stays in memory.
Knows names and files; which names a model has is in `names.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LoadError
from .ops import FloatType, Matrix
from .safetensors import SafetensorsFile, TensorEntry
from .torch_file import TorchFile

_SINGLE = "model.safetensors"
_OLDER = "pytorch_model.bin"
_INDEX = "model.safetensors.index.json"


class StoredMatrix:
    """A matrix in its file, row by row."""

    def __init__(self, file: SafetensorsFile | TorchFile, entry: TensorEntry) -> None:
        self._file = file
        self._entry = entry

    @property
    def name(self) -> str:
        return self._entry.name

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self._entry.shape
        return rows, columns

    @property
    def dtype(self) -> FloatType:
        return self._entry.dtype

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        rows, columns = self.shape
        stop = rows if stop is None else min(stop, rows)
        return self._file.read(self._entry, start * columns, (stop - start) * columns).reshape(-1, columns)

    def mapped(self) -> NDArray[Any] | None:
        return self._file.mapped(self._entry)


class TransposedMatrix(StoredMatrix):
    """A matrix whose file holds its columns as rows (GPT-2's)."""

    @property
    def shape(self) -> tuple[int, int]:
        columns, rows = self._entry.shape
        return rows, columns

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        rows, columns = self.shape
        stop = rows if stop is None else min(stop, rows)
        piece = np.empty((stop - start, columns), dtype=np.float32)
        for column in range(columns):
            piece[:, column] = self._file.read(self._entry, column * rows + start, stop - start)
        return piece

    def mapped(self) -> NDArray[Any] | None:
        return None


class GatheredRows:
    """Some rows of a matrix, in the order of `rows`."""

    def __init__(self, matrix: Matrix, rows: NDArray[np.int32]) -> None:
        self._matrix = matrix
        self._rows = rows

    @property
    def name(self) -> str:
        return f"{self._matrix.name} of {len(self._rows)} rows"

    @property
    def shape(self) -> tuple[int, int]:
        return len(self._rows), self._matrix.shape[1]

    @property
    def dtype(self) -> FloatType:
        return self._matrix.dtype

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        rows = self._rows[start:stop].tolist()
        return np.concatenate([self._matrix.read(row, row + 1) for row in rows])

    def mapped(self) -> NDArray[Any] | None:
        return None


class Checkpoint:
    """The safetensors of a directory. A context manager: what was not packed by the end is not to be read.

    A base model's checkpoint lacks the `prefix` of its names ("model.", "transformer."); both forms are found.
    `or_older`: a directory without safetensors may have pytorch_model.bin, as published EAGLE heads do.
    """

    def __init__(self, model_dir: str | Path, prefix: str = "", *, or_older: bool = False) -> None:
        self.directory = Path(model_dir)
        self._prefix = prefix
        self._or_older = or_older
        self._files: dict[str, SafetensorsFile | TorchFile] = {}
        self._source, self._file_of = self._catalogue()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def matrix(self, name: str, shape: tuple[int, int], *, transposed: bool = False) -> Matrix:
        """[out, in] of `shape`. `transposed`: the file holds [in, out]."""
        file, entry = self._find(name, shape[::-1] if transposed else shape)
        return TransposedMatrix(file, entry) if transposed else StoredMatrix(file, entry)

    def has(self, name: str) -> bool:
        return name in self._file_of or name.removeprefix(self._prefix) in self._file_of

    def integers(self, name: str, size: int) -> NDArray[np.int64]:
        file, stored = self._file_with(name, (size,))
        return file.integers(stored, size)

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        file, entry = self._find(name, (size,))
        return file.read(entry, 0, size)

    def _find(self, name: str, shape: tuple[int, ...]) -> tuple[SafetensorsFile | TorchFile, TensorEntry]:
        file, stored = self._file_with(name, shape)
        entry = file.entry(stored)
        if entry.shape != shape:
            raise LoadError(
                f"tensor {stored} in {file.path} has shape {list(entry.shape)}, config.json makes it {list(shape)}; "
                "config.json and weights do not belong together"
            )
        return file, entry

    def _file_with(self, name: str, shape: tuple[int, ...]) -> tuple[SafetensorsFile | TorchFile, str]:
        """The file, and what the tensor is called there."""
        stored = name if name in self._file_of else name.removeprefix(self._prefix)
        if stored not in self._file_of:
            raise LoadError(
                f"tensor {name} of shape {list(shape)} is missing in {self._source}; "
                "config.json and weights do not belong together, or the download is incomplete"
            )
        file = self._open(self._file_of[stored])
        if stored not in file.names:
            raise LoadError(
                f"tensor {stored} is not in {file.path}, although {self._source} says so; download it again"
            )
        return file, stored

    def _open(self, file_name: str) -> SafetensorsFile | TorchFile:
        if file_name not in self._files:
            kind = TorchFile if file_name == _OLDER else SafetensorsFile
            self._files[file_name] = kind(self.directory / file_name)
        return self._files[file_name]

    def _catalogue(self) -> tuple[Path, dict[str, str]]:
        """Where the list of tensors is, and the file of each."""
        single, index = self.directory / _SINGLE, self.directory / _INDEX
        if single.is_file():
            return single, dict.fromkeys(self._open(_SINGLE).names, _SINGLE)
        if index.is_file():
            return index, _weight_map(index)
        if self._or_older and (self.directory / _OLDER).is_file():
            return self.directory / _OLDER, dict.fromkeys(self._open(_OLDER).names, _OLDER)
        raise LoadError(self._without_safetensors())

    def _without_safetensors(self) -> str:
        missing = f"{self.directory} has neither {_SINGLE} nor {_INDEX}"
        if any(self.directory.glob("pytorch_model*.bin*")):
            return (
                f"{missing}, only pytorch_model.bin, which can run code when it is read; convert it once with "
                "AutoModelForCausalLM.from_pretrained(directory).save_pretrained(directory), an EAGLE head with "
                'safetensors.torch.save_file(torch.load("pytorch_model.bin", weights_only=True), "model.safetensors")'
            )
        return f"{missing}; download the model's safetensors files"


def _weight_map(index: Path) -> dict[str, str]:
    try:
        file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        well_formed = all(Path(file).name == file for file in file_of.values())  # beside the index, nowhere else
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LoadError(f"{index} has no readable weight_map ({error}); download it again") from error
    if not well_formed:
        raise LoadError(f"{index} names files outside its own directory; download it again")
    return dict(file_of)
