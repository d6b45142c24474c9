"""The GGUF reader, against bytes written by hand."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from neuronserve.server.gguf import BadGguf, GgufFile

F32, Q4_1, Q8_0 = 0, 3, 8


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(encoding: int, shape: tuple[int, ...], payload: bytes) -> bytes:
    """One metadata key and one tensor; dimensions are stored innermost first, data starts at a multiple of 32."""
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    header += text("answer") + struct.pack("<II", 4, 42)
    header += text("w") + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
    header += struct.pack("<IQ", encoding, 0)
    return header + b"\0" * (-len(header) % 32) + payload


def test_metadata_and_shape_are_read() -> None:
    file = GgufFile(gguf(F32, (2, 3), np.arange(6, dtype="<f4").tobytes()))

    assert file.metadata == {"answer": 42}
    assert file.read("w").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_q8_0_is_scale_times_byte() -> None:
    payload = np.float16(0.5).tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes()

    assert GgufFile(gguf(Q8_0, (32,), payload)).read("w").tolist() == [i / 2 for i in range(-16, 16)]


def test_q4_1_keeps_the_first_sixteen_weights_in_the_low_nibbles() -> None:
    # Byte i holds weight i below and weight 16 + i above: i and 15 - i.
    nibbles = bytes(i | (15 - i) << 4 for i in range(16))
    payload = np.float16(2).tobytes() + np.float16(-1).tobytes() + nibbles

    expected = [2 * i - 1 for i in range(16)] + [2 * (15 - i) - 1 for i in range(16)]
    assert GgufFile(gguf(Q4_1, (32,), payload)).read("w").tolist() == expected


def test_an_unknown_encoding_is_named_with_those_that_are_read() -> None:
    with pytest.raises(BadGguf, match="tensor 'w' has encoding 14; F32, F16, Q4_1, Q8_0 are read"):
        GgufFile(gguf(14, (32,), bytes(64))).read("w")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PK\3\4", "starts with b'PK"),
        (b"GGUF" + struct.pack("<I", 9), "version 9"),
        (b"GGUF" + struct.pack("<IQ", 3, 1), "ends inside its header"),
    ],
)
def test_what_is_not_gguf_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(BadGguf, match=message):
        GgufFile(data)


def test_a_file_cut_inside_a_tensor_is_refused() -> None:
    whole = gguf(F32, (8,), bytes(32))

    with pytest.raises(BadGguf, match="ends inside tensor 'w'"):
        GgufFile(whole[:-4]).read("w")
