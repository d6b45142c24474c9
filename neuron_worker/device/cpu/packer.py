"""A checkpoint's tensors into what the kernels read: weights in panels, everything else as float32 rows.

A panel holds `panel_width` output channels side by side for each input, so that a product reads memory from one end to
the other. A gate's panel holds half a panel of gate channels, then the same channels of the up projection: both meet
in one tile. Rows are read a few megabytes at a time and packed by all threads.
Knows no architecture: `graph/decoder.py` says what to pack.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..base import Float32
from ..graph.ops import FloatType, LinearWeight, Matrix, NormWeight
from .library import QUANTIZED, TYPES, Memory, PackJob, Session, address

_PIECE_BYTES = 2 << 20
_SLAB_BYTES = 64 << 20
_ALIGNMENT = 64
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "uint8": 1, "float24": 3}
_GROUP = 4


def panel_items(kind: str, channels: int, columns: int) -> int:
    """Values of a packed matrix; see `kernels/dot.h` for the groups of uint8."""
    return channels * (_round_up(columns, _GROUP) if kind == "uint8" else columns)


@dataclass(frozen=True)
class Panels:
    """`LinearWeight.packed`. `scale` and the weight's bias are in the order of the panels' channels."""

    address: int
    type: str  # one of `library.TYPES`
    scale: Float32 | None
    memory: object  # kept alive: what the address lies in


@dataclass(frozen=True)
class Table:
    """Rows to look up; the values may lie in the checkpoint's own file."""

    values: NDArray[Any]
    type: str
    width: int


class NativePacker:
    """See `graph.ops.Packer`."""

    def __init__(self, session: Session, dtype: FloatType, activations: str = "float32") -> None:
        self._session = session
        self._dtype = dtype
        self._int8 = "uint8" if activations == "int8" else "int8"
        self._slab: Memory | None = None
        self._slab_used = 0
        self.num_bytes = 0  # of all that was packed
        self.types: set[str] = set()  # of the matrices

    def linear(
        self,
        parts: Sequence[Matrix],
        bias: NDArray[np.float32] | None = None,
        *,
        quantize: bool = False,
        gate: bool = False,
    ) -> LinearWeight:
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        channels = _round_up(rows, self._session.panel_width)
        kind = self._int8 if quantize else self._kind_of(parts)
        packed = self._panels(parts, kind, channels, gate)
        self.types.add(kind)
        self.num_bytes += rows * (columns * ITEM_BYTES[kind] + (4 if quantize else 0))
        return LinearWeight(columns, rows, packed, None if bias is None else self._in_order(bias, channels, gate))

    def norm(
        self,
        kind: Literal["rms", "layer"],
        epsilon: float,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None = None,
    ) -> NormWeight:
        return NormWeight(kind, epsilon, self._vector(weight), None if bias is None else self._vector(bias))

    def table(self, matrix: Matrix) -> Table:
        table = self._table(matrix)
        self.num_bytes += table.values.nbytes
        return table

    def rope_table(self, table: NDArray[np.float32]) -> Float32:
        return self._vector(table)

    def _kind_of(self, parts: Sequence[Matrix]) -> str:
        """Of float32 weights the narrowest type that holds them all, where the processor widens it at once: the same
        numbers, for less memory and less that a step reads. Most checkpoints are in bfloat16, or were; what was
        unpacked from 4-bit weights has 24 bits. Elsewhere widening took twice as long as reading."""
        if self._dtype != "float32" or not self._session.kept:
            return self._dtype
        stored = {part.dtype for part in parts}
        kind = stored.pop() if len(stored) == 1 else "float32"
        held = _narrowest(parts) if kind == "float32" else kind
        return held if held == "float32" or self._session.keeps(held) else "float32"

    def _panels(self, parts: Sequence[Matrix], kind: str, channels: int, gate: bool) -> Panels:
        where, memory = self._take(panel_items(kind, channels, parts[0].shape[1]) * ITEM_BYTES[kind])
        packed = Panels(where, kind, np.zeros(channels, dtype=np.float32) if kind in QUANTIZED else None, memory)
        first = 0
        for half, part in enumerate(parts):
            self._pack(part, packed, 0 if gate else first, half if gate else None)
            first += part.shape[0]
        return packed

    def _table(self, matrix: Matrix) -> Table:
        # A wider type holds every value of a narrower one, so float32 can read the file's own rows.
        exact = matrix.dtype if self._dtype == "float32" else self._dtype
        values = matrix.mapped() if matrix.dtype == exact else None
        if values is None:
            values, exact = _narrow(matrix, self._dtype), self._dtype
        return Table(values, exact, matrix.shape[1])

    def _pack(self, matrix: Matrix, packed: Panels, first: int, half: int | None) -> None:
        rows, columns = matrix.shape
        step = max(1, _PIECE_BYTES // (4 * columns))
        for start in range(0, rows, step):
            piece = matrix.read(start, min(start + step, rows))
            job = PackJob()
            job.source, job.rows, job.panels = address(piece), len(piece), packed.address
            setattr(job, "in", columns)
            job.first_row = first + start
            job.gate_half, job.is_gate = half or 0, half is not None
            job.type = TYPES.index(packed.type)
            job.scale = None if packed.scale is None else address(packed.scale)
            self._session.pack(job)

    def _take(self, size: int) -> tuple[int, Memory]:
        """Zeroed memory from a slab: one large mapping can be in large pages, many small ones cannot."""
        size = _round_up(size, _ALIGNMENT)
        if self._slab is None or self._slab.size - self._slab_used < size:
            self._slab, self._slab_used = Memory(self._session.library, max(_SLAB_BYTES, size)), 0
        self._slab_used += size
        return self._slab.address + self._slab_used - size, self._slab

    def _in_order(self, bias: NDArray[np.float32], channels: int, gate: bool) -> Float32:
        ordered = np.zeros(channels, dtype=np.float32)
        rows = np.arange(len(bias))
        if gate:
            half = self._session.panel_width // 2
            is_up, rows = np.divmod(rows, len(bias) // 2)
            rows = rows // half * 2 * half + rows % half + is_up * half
        ordered[rows] = bias
        self.num_bytes += bias.nbytes
        return ordered

    def _vector(self, values: NDArray[np.float32]) -> Float32:
        self.num_bytes += values.nbytes
        return np.ascontiguousarray(values, dtype=np.float32)


def _narrow(matrix: Matrix, dtype: FloatType) -> NDArray[Any]:
    """All rows in `dtype`, read piecewise; bfloat16 as its bits."""
    rows, columns = matrix.shape
    stored = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]
    values = np.empty((rows, columns), dtype=stored)
    step = max(1, _PIECE_BYTES // (4 * columns))
    for start in range(0, rows, step):
        piece = matrix.read(start, min(start + step, rows))
        if dtype == "bfloat16":
            bits = piece.view(np.uint32)
            values[start : start + step] = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16  # to nearest, ties to even
        else:
            values[start : start + step] = piece
    return values


def _narrowest(parts: Sequence[Matrix]) -> str:
    """What holds every value of `parts`: bfloat16, "float24" for a last byte of zero, else float32."""
    used = 0
    for part in parts:
        rows, columns = part.shape
        step = max(1, _PIECE_BYTES // (4 * columns))
        for start in range(0, rows, step):
            piece = part.read(start, min(start + step, rows))
            used |= int(np.bitwise_or.reduce(piece.view(np.uint32), axis=None))
            if used & 0xFF:
                return "float32"
    if not used & 0xFFFF:
        return "bfloat16"
    return "float32" if parts[0].shape[1] % 2 else "float24"  # a file's cache lines hold pairs of inputs


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pointer(values: NDArray[Any] | None) -> int:
    """For a field of `struct op`."""
    return 0 if values is None else address(values)


assert ctypes.sizeof(ctypes.c_void_p) == 8  # `struct op` is laid out for 64 bits
