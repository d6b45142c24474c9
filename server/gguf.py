"""A GGUF file in, its metadata and float32 tensors out; the four tensor encodings the demo model needs, no more.

Knows the container and its block encodings. Knows nothing of models, tokenizers or where a file came from.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
BLOCK = 32
"""Weights per quantised block."""


class BadGguf(ValueError):
    """The bytes are not a GGUF file this reader understands."""


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies and how it is stored. `shape` is row-major, the outermost dimension first."""

    name: str
    shape: tuple[int, ...]
    encoding: int
    offset: int

    @property
    def num_weights(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


def decode_f32(raw: Bytes) -> Floats:
    return raw.view("<f4").astype(np.float32)


def decode_f16(raw: Bytes) -> Floats:
    return raw.view("<f2").astype(np.float32)


def decode_q8_0(raw: Bytes) -> Floats:
    """A block is a half-precision scale and 32 signed bytes: w = scale * byte."""
    blocks = raw.reshape(-1, 2 + BLOCK)  # [blocks, 34]
    scale = blocks[:, :2].copy().view("<f2").astype(np.float32)  # [blocks, 1]
    return (scale * blocks[:, 2:].view(np.int8)).reshape(-1)


def decode_q4_1(raw: Bytes) -> Floats:
    """A block is a half-precision scale and minimum, then 16 bytes; low nibbles are weights 0-15, high ones 16-31."""
    blocks = raw.reshape(-1, 4 + BLOCK // 2)  # [blocks, 20]
    halves: Floats = blocks[:, :4].copy().view("<f2").astype(np.float32)  # [blocks, 2]
    nibbles = np.concatenate([blocks[:, 4:] & 0x0F, blocks[:, 4:] >> 4], axis=1)  # [blocks, 32]
    weights: Floats = halves[:, :1] * nibbles + halves[:, 1:]  # [blocks, 32]
    return weights.reshape(-1)


@dataclass(frozen=True)
class Encoding:
    name: str
    block_weights: int
    block_bytes: int
    decode: Callable[[Bytes], Floats]


ENCODINGS = {
    0: Encoding("F32", 1, 4, decode_f32),
    1: Encoding("F16", 1, 2, decode_f16),
    3: Encoding("Q4_1", BLOCK, 4 + BLOCK // 2, decode_q4_1),
    8: Encoding("Q8_0", BLOCK, 2 + BLOCK, decode_q8_0),
}


class Cursor:
    """Reads little-endian values one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def scalar(self, code: str) -> Any:
        layout = struct.Struct("<" + code)
        (value,) = layout.unpack_from(self.data, self.position)
        self.position += layout.size
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        start, self.position = self.position, self.position + length
        return self.data[start : self.position].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            inner, length = self.scalar("I"), self.scalar("Q")
            return [self.value(inner) for _ in range(length)]
        if kind not in SCALARS:
            raise BadGguf(f"metadata value of type {kind} at byte {self.position}; known are {sorted(SCALARS)}")
        return self.scalar(SCALARS[kind])

    def tensor_info(self) -> TensorInfo:
        name = self.string()
        innermost_first = [self.scalar("Q") for _ in range(self.scalar("I"))]
        return TensorInfo(name, tuple(reversed(innermost_first)), self.scalar("I"), self.scalar("Q"))


class GgufFile:
    """`metadata` by key and `tensors` by name; `read` decodes one tensor, so only one is in memory as float32."""

    def __init__(self, data: bytes) -> None:
        if data[:4] != MAGIC:
            raise BadGguf(f"the file starts with {data[:4]!r}, not {MAGIC!r}")
        cursor = Cursor(data)
        cursor.position = len(MAGIC)
        try:
            self._read_header(cursor)
        except struct.error as error:
            raise BadGguf(f"the file ends inside its header, after {len(data)} bytes") from error
        alignment = self.metadata.get("general.alignment", 32)
        self._data = np.frombuffer(data, dtype=np.uint8)
        self._start = -(-cursor.position // alignment) * alignment

    def _read_header(self, cursor: Cursor) -> None:
        version = cursor.scalar("I")
        if version not in VERSIONS:
            raise BadGguf(f"GGUF version {version}; versions {VERSIONS} are read")
        num_tensors, num_keys = cursor.scalar("Q"), cursor.scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        infos = [cursor.tensor_info() for _ in range(num_tensors)]
        self.tensors = {info.name: info for info in infos}

    def read(self, name: str) -> Floats:
        """The tensor as float32 in its row-major shape."""
        info = self.tensors[name]
        encoding = ENCODINGS.get(info.encoding)
        if encoding is None:
            known = ", ".join(known.name for known in ENCODINGS.values())
            raise BadGguf(f"tensor {name!r} has encoding {info.encoding}; {known} are read")
        size = info.num_weights // encoding.block_weights * encoding.block_bytes
        start = self._start + info.offset
        raw = self._data[start : start + size]
        if raw.size < size:
            raise BadGguf(f"the file ends inside tensor {name!r}")
        return encoding.decode(raw).reshape(info.shape)
