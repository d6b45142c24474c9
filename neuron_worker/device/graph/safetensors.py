"""One safetensors file: its header, and any rows of any tensor as float32, with nothing else brought into memory.

The layout is a little-endian length, a JSON header of that length, then the tensors' bytes. Reads are `pread`, so that
what was read and packed does not stay in this process; a tensor may also be mapped, and then its pages are the file's.
Knows no model and no tensor names.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LoadError
from .ops import FloatType

_TYPES: dict[str, FloatType] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_STORED: dict[FloatType, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # the upper half of a float32's bits
}
_LONGEST_HEADER = 100_000_000  # the format's own limit


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies. `start` counts from the beginning of the file."""

    name: str
    dtype: FloatType
    shape: tuple[int, ...]
    start: int

    @property
    def item_bytes(self) -> int:
        return _STORED[self.dtype].itemsize

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


class SafetensorsFile:
    """Opened and checked on construction. Close it when the last tensor was read; mappings outlive that."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._descriptor = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise LoadError(f"{path} cannot be opened ({error.strerror}); download it again") from error
        self._mapping: mmap.mmap | None = None
        try:
            self._header, self._data_start = self._read_header()
        except LoadError:
            self.close()
            raise

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def names(self) -> list[str]:
        return list(self._header)

    def entry(self, name: str) -> TensorEntry:
        """Checked against the file, so that reading it cannot run past the end."""
        stored, shape, begin, end = self._described(name)
        if stored not in _TYPES:
            raise LoadError(f"{name} in {self.path} has type {stored}; supported are {', '.join(_TYPES)}")
        entry = TensorEntry(name, _TYPES[stored], shape, self._data_start + begin)
        self._check(name, entry.num_bytes, begin, end)
        return entry

    def integers(self, name: str, size: int) -> NDArray[np.int64]:
        """A vector of whole numbers."""
        stored, shape, begin, end = self._described(name)
        if stored != "I64" or shape != (size,):
            raise LoadError(f"{name} in {self.path} is {stored} {list(shape)}; it must be I64 [{size}]")
        values = np.empty(size, dtype="<i8")
        self._check(name, values.nbytes, begin, end)
        self._read_into(values.data.cast("B"), self._data_start + begin)
        return values

    def _described(self, name: str) -> tuple[str, tuple[int, ...], int, int]:
        """Its type and shape, and where its data begins and ends."""
        described = self._header[name]
        try:
            shape = tuple(int(size) for size in described["shape"])
            begin, end = (int(offset) for offset in described["data_offsets"])
            return str(described["dtype"]), shape, begin, end
        except (KeyError, TypeError, ValueError) as error:
            raise self._corrupt(f"tensor {name} is described by {described!r}") from error

    def _check(self, name: str, num_bytes: int, begin: int, end: int) -> None:
        if min(0, begin, num_bytes) < 0 or end - begin != num_bytes:
            raise self._corrupt(f"tensor {name} of {num_bytes} bytes has {end - begin}")
        if self._data_start + end > self._size():
            raise self._corrupt(f"tensor {name} ends at byte {self._data_start + end}, the file at {self._size()}")

    def read(self, entry: TensorEntry, first: int, count: int) -> NDArray[np.float32]:
        """`count` elements from the `first` on, as a new float32 array."""
        stored = np.empty(count, dtype=_STORED[entry.dtype])
        self._read_into(stored.data.cast("B"), entry.start + first * entry.item_bytes)
        return _as_float32(stored, entry.dtype)

    def mapped(self, entry: TensorEntry) -> NDArray[Any] | None:
        """The stored values in the file's own pages, or None where they do not lie on a multiple of their size."""
        if entry.start % entry.item_bytes or entry.num_bytes == 0:
            return None
        if self._mapping is None:
            self._mapping = mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)
        flat = np.frombuffer(self._mapping, _STORED[entry.dtype], math.prod(entry.shape), entry.start)
        return flat.reshape(entry.shape)

    def _read_header(self) -> tuple[Mapping[str, Any], int]:
        size = self._size()
        prefix = os.pread(self._descriptor, 8, 0)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(size - 8, _LONGEST_HEADER):
            raise self._corrupt(f"its header would have {length} of {size} bytes")
        text = bytearray(length)
        self._read_into(memoryview(text), 8)
        try:
            header = json.loads(text)
        except ValueError as error:
            raise self._corrupt(f"its header is not JSON: {error}") from error
        if not isinstance(header, dict):
            raise self._corrupt("its header is not a JSON object")
        header.pop("__metadata__", None)
        return header, 8 + length

    def _read_into(self, target: memoryview, offset: int) -> None:
        done = 0
        while done < len(target):  # one call reads at most 2 GiB
            count = os.preadv(self._descriptor, [target[done:]], offset + done)
            if count == 0:
                raise self._corrupt(f"it ends before byte {offset + len(target)}")
            done += count

    def _size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def _corrupt(self, what: str) -> LoadError:
        return LoadError(f"{self.path} is truncated or corrupt: {what}; download it again")


def _as_float32(stored: NDArray[Any], dtype: FloatType) -> NDArray[np.float32]:
    if dtype != "bfloat16":
        return stored.astype(np.float32, copy=False)
    wide = stored.astype(np.uint32)
    wide <<= 16
    return wide.view(np.float32)
