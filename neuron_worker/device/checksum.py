"""Whether a file is the one that was written: a digest quick enough to be taken at every start.

A file is read as 64-bit words in tables of 512 columns; the sums of every row and of every column (modulo 2**64) go
into SHA-256. One wrong word changes two sums, words that changed places change four, and it takes four errors in a
rectangle that cancel each other to go unseen: it finds damage, not forgery. A cryptographic digest of all bytes would
take longer than loading them. Imports numpy alone.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .errors import LoadError

NAME = "sums512"
_COLUMNS = 512
_PIECE_BYTES = 1 << 20  # summed both ways while it is in a core's cache; a multiple of a row


Taken = Callable[[int, int], NDArray[np.uint8]]


def mapped(path: Path) -> NDArray[np.uint8]:
    """A file's bytes, not yet read."""
    try:
        with path.open("rb") as file:
            if not path.stat().st_size:  # nothing cannot be mapped
                return np.zeros(0, np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        raise LoadError(f"{path} cannot be read ({error.strerror}); export or download the model again") from None


def digest(data: NDArray[np.uint8], taken: Taken | None = None) -> str:
    """`taken(start, end)` gives that piece of `data` from where it has been put; several threads call it."""

    def sums_of(start: int) -> bytes:
        end = min(start + _PIECE_BYTES, len(data))
        return _sums(data[start:end] if taken is None else taken(start, end))

    total = hashlib.sha256(len(data).to_bytes(8, "little"))
    for sums in _on_all_cores(sums_of, range(0, len(data), _PIECE_BYTES)):
        total.update(sums)
    return total.hexdigest()


def _on_all_cores(function: Callable[[int], bytes], starts: Sequence[int]) -> list[bytes]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if len(starts) < 2:
        return [function(start) for start in starts]
    with ThreadPoolExecutor(cores) as pool:  # numpy sums without the interpreter's lock
        return list(pool.map(function, starts))


def _sums(piece: NDArray[np.uint8]) -> bytes:
    rest = len(piece) % (8 * _COLUMNS)
    if rest:
        piece = np.concatenate([piece, np.zeros(8 * _COLUMNS - rest, np.uint8)])
    words = piece.view("<u8").reshape(-1, _COLUMNS)
    rows: NDArray[np.uint64] = words.sum(axis=1, dtype=np.uint64)
    columns: NDArray[np.uint64] = words.sum(axis=0, dtype=np.uint64)
    return rows.astype("<u8").tobytes() + columns.astype("<u8").tobytes()
