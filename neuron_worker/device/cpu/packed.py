"""Packed weights as a file: written once from a checkpoint, then read at every start with nothing converted.

    write_packed(model_dir, options, directory) ── packed/cpu-avx512-bfloat16.safetensors ──▶ load_packed

The container is safetensors: panels under their first matrix's name with ".panels" and ".scale", look-up tables with
".table", vectors under their own; each starts on a cache line. Panels are made for one instruction set, and the file's
key says which; a machine with another packs the checkpoint, which the export holds too. Panels are read into large
pages and not mapped: over the small pages of a mapping every step would take about a fifth longer.
Knows the manifest of an export; who writes the rest of it is no concern here.
"""

from __future__ import annotations

import ctypes
import json
import logging
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from .. import checksum
from ..base import DeviceOptions
from ..errors import LoadError
from ..graph.decoder import Model, Tensors, build_model, load_model
from ..graph.names import NAMES
from ..graph.ops import FloatType, Matrix
from ..graph.spec import read_spec
from ..graph.weights import Checkpoint
from ..manifest import Manifest, PackedEntry
from .library import QUANTIZED, Memory, Session, address
from .packer import ITEM_BYTES, NativePacker, Panels, Table, panel_items

log = logging.getLogger(__name__)

LAYOUT = 2
"""Raise when packing gives other bytes for the same checkpoint; files of another layout are then not used.
In 1, float32 was the type of all matrices, whatever the checkpoint had."""

FOLDER = "packed"
_ALIGNMENT = 64
_TABLE = ".table"
_REMEDY = "export or download the model again"
_STORED: dict[str, tuple[str, Any]] = {
    "float32": ("F32", np.float32),
    "float16": ("F16", np.float16),
    "bfloat16": ("BF16", np.uint16),
    "int8": ("I8", np.int8),
    "uint8": ("U8", np.uint8),
    "float24": ("U8", np.dtype("V3")),  # of two dimensions, (items, 3)
}
_TYPE_OF = {stored: name for name, (stored, _) in _STORED.items() if name != "float24"}


def key_of(options: DeviceOptions, session: Session) -> dict[str, Any]:
    """Everything that decides the file's bytes, the checkpoint aside."""
    return {
        "device": "cpu",
        "layout": LAYOUT,
        "isa": session.panel_isa,
        "panel_width": session.panel_width,
        "dtype": options.dtype,
        "quantization": options.quantization,
        "quantize_head": options.quantization is not None and options.quantize_head,
        **({"activations": "int8"} if _rounds_activations(options) else {}),
        **({"narrow": " ".join(session.kept)} if options.dtype == "float32" else {}),
    }


def _rounds_activations(options: DeviceOptions) -> bool:
    return options.quantization is not None and options.activations == "int8"


def load(model_dir: str, options: DeviceOptions, session: Session) -> tuple[Model, NativePacker]:
    """The model, read where the directory holds it packed for this machine, else packed here."""
    dtype = cast(FloatType, options.dtype)
    manifest = Manifest.read(model_dir)
    entry = None if manifest is None else _entry(manifest, options, session)
    if manifest is None or entry is None:
        packer = NativePacker(session, dtype, options.activations)
        return load_model(model_dir, options, packer), packer
    manifest.check(model_dir, ["config.json"])
    file = PackedFile(Path(model_dir) / entry.file, session)
    file.read(lambda data, taken: manifest.check_data(model_dir, entry.file, data, taken))
    found = FindingPacker(session, dtype, file, options.activations)
    return build_model(read_spec(model_dir), file, found, options), found


def _entry(manifest: Manifest, options: DeviceOptions, session: Session) -> PackedEntry | None:
    wanted = key_of(options, session)
    ours = [entry for entry in manifest.packed if entry.key.get("device") == "cpu"]
    for entry in ours:
        if entry.key == wanted:
            return entry
    for entry in ours:
        differs = [name for name in {**wanted, **entry.key} if entry.key.get(name) != wanted.get(name)]
        values = ", ".join(f"{name} {entry.key.get(name)} and not {wanted.get(name)}" for name in differs)
        log.info("%s is packed for %s: the export's plain weights are packed instead", entry.file, values)
    return None


def write_packed(model_dir: str, options: DeviceOptions, directory: Path, session: Session) -> PackedEntry:
    """The checkpoint of `model_dir`, packed into a file under `directory`."""
    key = key_of(options, session)
    parts = ["cpu", session.panel_isa, options.dtype, *([options.quantization] if options.quantization else [])]
    parts += [word for word, given in (("head", key["quantize_head"]), ("activations", "activations" in key)) if given]
    file = f"{FOLDER}/{'-'.join(parts)}.safetensors"
    spec = read_spec(model_dir)
    packer = KeepingPacker(session, cast(FloatType, options.dtype), options.activations)
    with Checkpoint(model_dir, NAMES[spec.family].prefix) as checkpoint:
        named = NamedTensors(checkpoint)
        build_model(spec, named, packer, options)
        (directory / FOLDER).mkdir(parents=True, exist_ok=True)
        _write(directory / file, {**packer.kept, **named.vectors}, key)  # a table may lie in the checkpoint's pages
    return PackedEntry(file, key)


@dataclass(frozen=True)
class Piece:
    type: str  # one of `library.TYPES`
    values: NDArray[Any]


def _write(path: Path, pieces: Mapping[str, Piece], key: Mapping[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"key": json.dumps(key, sort_keys=True)}}
    start = 0
    for name, piece in pieces.items():
        shape = [_padded(piece.values.nbytes) // ITEM_BYTES[piece.type], *([3] if piece.type == "float24" else [])]
        end = start + _padded(piece.values.nbytes)
        header[name] = {"dtype": _STORED[piece.type][0], "shape": shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for piece in pieces.values():
            file.write(np.ascontiguousarray(piece.values).data.cast("B"))
            file.write(bytes(-piece.values.nbytes % _ALIGNMENT))


class KeepingPacker(NativePacker):
    """Packs, and keeps what it made by name."""

    def __init__(self, session: Session, dtype: FloatType, activations: str = "float32") -> None:
        super().__init__(session, dtype, activations)
        self.kept: dict[str, Piece] = {}
        self._made: list[Panels] = []  # whose memory the pieces lie in

    def _panels(self, parts: Sequence[Matrix], kind: str, channels: int, gate: bool) -> Panels:
        packed = super()._panels(parts, kind, channels, gate)
        self._made.append(packed)
        size = panel_items(kind, channels, parts[0].shape[1]) * ITEM_BYTES[kind]
        memory = (ctypes.c_char * size).from_address(packed.address)
        self.kept[f"{parts[0].name}.panels"] = Piece(kind, np.frombuffer(memoryview(memory), np.uint8))
        if packed.scale is not None:
            self.kept[f"{parts[0].name}.scale"] = Piece("float32", packed.scale)
        return packed

    def _table(self, matrix: Matrix) -> Table:
        table = super()._table(matrix)
        self.kept[f"{matrix.name}.table"] = Piece(table.type, table.values)
        return table


class NamedTensors:
    """A checkpoint whose matrices have the names they were asked for by, and whose vectors are kept."""

    def __init__(self, checkpoint: Tensors) -> None:
        self._checkpoint = checkpoint
        self.vectors: dict[str, Piece] = {}

    def matrix(self, name: str, shape: tuple[int, int], *, transposed: bool = False) -> Matrix:
        return NamedMatrix(name, self._checkpoint.matrix(name, shape, transposed=transposed))

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        values = self._checkpoint.vector(name, size)
        self.vectors[name] = Piece("float32", values)
        return values


@dataclass(frozen=True)
class NamedMatrix:
    """`inner` None: its values are packed already and not to be had."""

    name: str
    inner: Matrix | None
    its_shape: tuple[int, int] = (0, 0)

    @property
    def shape(self) -> tuple[int, int]:
        return self.its_shape if self.inner is None else self.inner.shape

    @property
    def dtype(self) -> FloatType:
        return self._inner.dtype

    def read(self, start: int = 0, stop: int | None = None) -> NDArray[np.float32]:
        return self._inner.read(start, stop)

    def mapped(self) -> NDArray[Any] | None:
        return self._inner.mapped()

    @property
    def _inner(self) -> Matrix:
        if self.inner is None:
            raise LoadError(f"{self.name} is packed: its own values are in the export's plain weights")
        return self.inner


class PackedFile:
    """A file of `write_packed`: panels and vectors in memory, tables where the file is mapped. Stands for a checkpoint;
    its matrices have names and shapes alone."""

    def __init__(self, path: Path, session: Session) -> None:
        self.path = path
        self.data = checksum.mapped(path)
        self.memory = Memory(session.library, max(1, len(self.data)))
        pages = (ctypes.c_uint8 * len(self.data)).from_address(self.memory.address)
        self._pages: NDArray[np.uint8] = np.ctypeslib.as_array(pages)

    def read(self, check: Callable[[NDArray[np.uint8], checksum.Taken], None]) -> None:
        """`check` sums each piece while it is in a core's cache. What was read is what is checked."""
        tables = self._tables()
        try:
            with self.path.open("rb") as file:

                def taken(start: int, end: int) -> NDArray[np.uint8]:
                    if any(first <= start and end <= last for first, last in tables):
                        return self.data[start:end]
                    return self._fill(file.fileno(), start, end)

                check(self.data, taken)
        except OSError as error:
            raise LoadError(f"{self.path} cannot be read ({error.strerror}); {_REMEDY}") from None

    def _fill(self, file: int, start: int, end: int) -> NDArray[np.uint8]:
        piece = self._pages[start:end]
        buffer: Any = piece
        while start < end:
            count = os.preadv(file, [memoryview(buffer)[start - end :]], start)
            if not count:
                raise LoadError(f"{self.path} ends at byte {start}; {_REMEDY}")
            start += count
        return piece

    def _tables(self) -> list[tuple[int, int]]:
        """Where rows are looked up one by one, which small pages do not slow down: they stay in the file. Of a
        damaged header nothing is known, and its checksum will say that it is."""
        try:
            found = [entry["data_offsets"] for name, entry in self._header.items() if name.endswith(_TABLE)]
            return [(self._start + first, self._start + last) for first, last in found]
        except (ValueError, KeyError, TypeError, AttributeError, struct.error):
            return []

    @cached_property
    def _header(self) -> Mapping[str, Any]:
        header: Mapping[str, Any] = json.loads(self.data[8 : self._start].tobytes())
        return header

    @cached_property
    def _start(self) -> int:
        return 8 + int(struct.unpack("<Q", self.data[:8].tobytes())[0])

    def matrix(self, name: str, shape: tuple[int, int], *, transposed: bool = False) -> Matrix:
        return NamedMatrix(name, None, shape)

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        return self.piece(name, size).values.copy()  # of no memory but its own

    def piece(self, name: str, size: int) -> Piece:
        """Its first `size` elements: what follows fills a cache line."""
        begin, end = self._described(name)["data_offsets"]
        kind = self.type_of(name)
        if _padded(size * ITEM_BYTES[kind]) != end - begin:
            raise LoadError(
                f"{name} in {self.path} has {end - begin} bytes, config.json makes it {size} of {kind}; "
                "config.json and weights do not belong together"
            )
        data = self.data if name.endswith(_TABLE) else self._pages
        return Piece(kind, np.frombuffer(data, _STORED[kind][1], size, self._start + begin))

    def type_of(self, name: str) -> str:
        """One of `library.TYPES`."""
        described = self._described(name)
        return _TYPE_OF[described["dtype"]] if len(described["shape"]) == 1 else "float24"

    def _described(self, name: str) -> Mapping[str, Any]:
        described: Mapping[str, Any] | None = self._header.get(name)
        if described is None:
            raise LoadError(f"{name} is missing in {self.path}; config.json and weights do not belong together")
        return described


class FindingPacker(NativePacker):
    """Finds packed what it is asked to pack."""

    def __init__(self, session: Session, dtype: FloatType, file: PackedFile, activations: str = "float32") -> None:
        super().__init__(session, dtype, activations)
        self._file = file

    def _kind_of(self, parts: Sequence[Matrix]) -> str:
        found = self._file.type_of(f"{parts[0].name}.panels")
        return found if self._dtype == "float32" and found not in QUANTIZED else self._dtype

    def _panels(self, parts: Sequence[Matrix], kind: str, channels: int, gate: bool) -> Panels:
        name = parts[0].name
        piece = self._file.piece(f"{name}.panels", panel_items(kind, channels, parts[0].shape[1]))
        if piece.type != kind:
            raise LoadError(f"{name} in {self._file.path} is {piece.type}, not {kind}; export the model again")
        scale = self._file.piece(f"{name}.scale", channels).values if kind in QUANTIZED else None
        return Panels(address(piece.values), kind, scale, self._file.memory)

    def _table(self, matrix: Matrix) -> Table:
        piece = self._file.piece(f"{matrix.name}.table", math.prod(matrix.shape))
        return Table(piece.values.reshape(matrix.shape), piece.type, matrix.shape[1])


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
