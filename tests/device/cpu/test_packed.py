"""Packed weights in a file: the same bits as from the checkpoint, used where they fit, and refused where damaged."""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from neuronserve.neuron_worker import tiny_checkpoint
from neuronserve.neuron_worker.device import checksum
from neuronserve.neuron_worker.device.base import DeviceOptions, StepShape, Want
from neuronserve.neuron_worker.device.cpu import packed, packer
from neuronserve.neuron_worker.device.cpu.device import CpuDevice
from neuronserve.neuron_worker.device.cpu.library import ISA_VARIABLE, NativeMissing, Session
from neuronserve.neuron_worker.device.cpu.program import padding_batch
from neuronserve.neuron_worker.device.errors import LoadError
from neuronserve.neuron_worker.device.graph.ops import FloatType
from neuronserve.neuron_worker.device.manifest import Manifest, entry_of

from .harness import every_set, instruction_sets, keeps

pytestmark = pytest.mark.skipif(not instruction_sets(), reason="the kernels cannot be compiled here")


@dataclass(frozen=True)
class InMemory:
    """A `Matrix`."""

    values: np.ndarray
    name = "values"
    dtype: FloatType = "float32"

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    def read(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        return self.values[start:stop]

    def mapped(self) -> None:
        return None


LONGEST = 192
FORMS: list[tuple[str, str | None, bool, str]] = [
    ("float32", None, False, "float32"),
    ("bfloat16", None, False, "float32"),
    ("float32", "int8", False, "float32"),
    ("float16", "int8", True, "float32"),
    ("float32", "int8", True, "int8"),
]


def options(
    dtype: str = "float32", quantization: str | None = None, head: bool = False, activations: str = "float32"
) -> DeviceOptions:
    how = {"dtype": dtype, "quantization": quantization, "quantize_head": head, "activations": activations}
    return DeviceOptions(2, LONGEST, 16, 1, threads=1, **how)  # type: ignore[arg-type]


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return tiny_checkpoint.write(tmp_path / "checkpoint")


def export(checkpoint: str, into: Path, how: DeviceOptions, *, with_plain: bool = False) -> str:
    """What the device looks at in an export of ours."""
    into.mkdir()
    names = ["config.json", *(["model.safetensors"] if with_plain else [])]
    for name in names:
        (into / name).write_bytes((Path(checkpoint) / name).read_bytes())
    entry = packed.write_packed(checkpoint, how, into, Session(1))
    files = {name: entry_of(into / name) for name in [*names, entry.file]}
    Manifest("0", "cpu", how.quantization, how.quantize_head, files, [entry]).write(into)
    return str(into)


def logits(directory: str, how: DeviceOptions, num_tokens: int = 4) -> bytes:
    """Of one step that reads so many tokens."""
    device = CpuDevice()
    device.load(directory, how)
    device.allocate(1 + LONGEST // 16)
    shape = StepShape(decode_rows=0, decode_width=1, prefill_tokens=num_tokens, context=LONGEST)
    device.compile(shape)
    device.seal()
    num_blocks = LONGEST // 16
    batch = padding_batch(shape, 1, num_blocks, 1)
    assert batch.prefill is not None
    batch.prefill.tokens[:] = np.arange(5, 5 + num_tokens)
    batch.prefill.lengths[:], batch.prefill.blocks[:] = num_tokens, [range(1, 1 + num_blocks)]
    batch.sampling.want[:] = Want.LOGITS
    found = device.run(batch).logits
    assert found is not None
    assert np.isfinite(found).all()
    made = found.tobytes()
    device.close()
    return made


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_packed_weights_give_the_same_bits(
    checkpoint: str, tmp_path: Path, form: tuple[str, str | None, bool, str]
) -> None:
    how = options(*form)
    made = export(checkpoint, tmp_path / "export", how)  # no plain weights: they cannot have been read
    assert logits(made, how) == logits(checkpoint, how)


def stored_as(kind: torch.dtype, checkpoint: str, into: Path, but: str = "none") -> tuple[str, str]:
    """The checkpoint with weights that `kind` holds, `but` for some: stored as that, and as float32."""
    found = []
    for name, stored in (("narrow", kind), ("wide", torch.float32)):
        (into / name).mkdir()
        (into / name / "config.json").write_bytes((Path(checkpoint) / "config.json").read_bytes())
        weights = load_file(f"{checkpoint}/model.safetensors").items()
        tensors = {key: value if but in key else value.to(kind).to(stored) for key, value in weights}
        save_file(tensors, into / name / "model.safetensors")
        found.append(str(into / name))
    return found[0], found[1]


def without_last_byte(checkpoint: str, into: Path, but: str = "none") -> str:
    """Its float32 weights, as of a model that was unpacked from 4-bit weights."""
    into.mkdir()
    (into / "config.json").write_bytes((Path(checkpoint) / "config.json").read_bytes())
    weights = load_file(f"{checkpoint}/model.safetensors")
    short = {key: (value.view(torch.int32) & ~0xFF).view(torch.float32) for key, value in weights.items()}
    save_file({key: weights[key] if but in key else value for key, value in short.items()}, into / "model.safetensors")
    return str(into)


InFourBytes = Callable[..., bytes]


@pytest.fixture
def in_four_bytes(monkeypatch: pytest.MonkeyPatch) -> InFourBytes:
    """`logits` of a float32 checkpoint in panels of float32, whatever would hold its values."""

    def found(directory: str, how: DeviceOptions, *num_tokens: int) -> bytes:
        with monkeypatch.context() as changed:
            changed.setattr(packer, "_narrowest", lambda parts: "float32")
            return logits(directory, how, *num_tokens)

    return found


NUM_TOKENS = [1, 4, 12, 40, 160]  # by rows, in tiles, and widened panel by panel


@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
def test_float32_of_a_narrower_checkpoint_is_the_same_bits(
    kind: torch.dtype, num_tokens: int, checkpoint: str, tmp_path: Path, in_four_bytes: InFourBytes
) -> None:
    narrow, wide = stored_as(kind, checkpoint, tmp_path)
    expected = in_four_bytes(wide, options(), num_tokens)
    for directory in (narrow, wide, export(narrow, tmp_path / "export", options())):
        assert logits(directory, options(), num_tokens) == expected


def test_float32_of_a_narrower_checkpoint_takes_half_the_memory(checkpoint: str, tmp_path: Path) -> None:
    narrow, wide = stored_as(torch.bfloat16, checkpoint, tmp_path)
    made = export(narrow, tmp_path / "export", options())
    facts = [CpuDevice().load(directory, options()) for directory in (narrow, wide, made, checkpoint)]
    sizes = [fact.weight_bytes for fact in facts]
    assert sizes[0] == sizes[2] < 0.55 * sizes[3]
    assert sizes[1] < 0.75 * sizes[3]  # its rows to look up are read where they lie
    assert all(fact.notes[1].startswith("weights stay in bfloat16") for fact in facts[:3])
    assert not any("stay" in note for note in facts[3].notes)


@every_set
def test_where_widening_would_cost_time_they_are_widened_at_load(
    isa: str, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow, wide = stored_as(torch.bfloat16, checkpoint, tmp_path)
    monkeypatch.setenv(ISA_VARIABLE, isa)
    for directory in (narrow, wide):
        stays = any(
            note.startswith("weights stay in bfloat16") for note in CpuDevice().load(directory, options()).notes
        )
        assert stays == (isa != "base" or platform.machine() == "aarch64")
    assert logits(narrow, options()) == logits(wide, options())


@every_set
def test_a_last_byte_of_zero_is_kept_where_three_bytes_would_cost_time(
    isa: str, checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_four_bytes: InFourBytes
) -> None:
    short = without_last_byte(checkpoint, tmp_path / "short")
    monkeypatch.setenv(ISA_VARIABLE, isa)
    notes = str(CpuDevice().load(short, options()).notes)
    assert ("without their last byte" in notes) == keeps("float24", isa) == (isa == "avx512")
    assert logits(short, options(), 40) == in_four_bytes(short, options(), 40)


@pytest.mark.parametrize(("quantization", "but"), [(None, "k_proj"), ("int8", "none")])
def test_what_is_narrow_in_part_stays_so_in_part(
    quantization: str | None, but: str, checkpoint: str, tmp_path: Path, in_four_bytes: InFourBytes
) -> None:
    """One of three matrices that are multiplied together is wider; and beside int8 the head alone is narrow."""
    narrow, wide = stored_as(torch.bfloat16, checkpoint, tmp_path, but)
    how = options("float32", quantization)
    expected = in_four_bytes(wide, how)
    for directory in (narrow, wide, export(narrow, tmp_path / "export", how)):
        assert logits(directory, how) == expected
    assert any(note.startswith("some weights stay in bfloat16") for note in CpuDevice().load(narrow, how).notes)


keeps_24_bits = pytest.mark.skipif(not keeps("float24"), reason="this processor keeps all bytes")


@keeps_24_bits
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("but", ["none", "k_proj", "lm_head"])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_a_last_byte_of_zero_is_not_kept_and_the_bits_are_the_same(
    num_tokens: int, but: str, quantization: str | None, checkpoint: str, tmp_path: Path, in_four_bytes: InFourBytes
) -> None:
    short, how = without_last_byte(checkpoint, tmp_path / "short", but), options("float32", quantization)
    made, expected = export(short, tmp_path / "export", how), in_four_bytes(short, how, num_tokens)
    for directory in (short, made):
        assert logits(directory, how, num_tokens) == expected
        is_kept_short = "without their last byte" in str(CpuDevice().load(directory, how).notes)
        assert is_kept_short == (quantization is None or but != "lm_head")


@keeps_24_bits
def test_and_takes_three_quarters_of_the_memory(checkpoint: str, tmp_path: Path) -> None:
    short = without_last_byte(checkpoint, tmp_path / "short")
    sizes = [CpuDevice().load(directory, options()).weight_bytes for directory in (short, checkpoint)]
    assert sizes[0] < 0.85 * sizes[1]  # rows to look up stay as they are


@pytest.mark.parametrize(
    ("columns", "bits", "held"),
    [
        (8, 0x3F810000, "bfloat16"),
        (8, 0x3F800100, "float24"),
        (8, 0x3F800001, "float32"),
        (7, 0x3F810000, "bfloat16"),
        (7, 0x3F800100, "float32"),
    ],
)
def test_every_value_counts(columns: int, bits: int, held: str) -> None:
    ones = InMemory(np.ones((4, columns), dtype=np.float32))
    values = np.ones((1_200_000 // columns, columns), dtype=np.float32)  # more than is read at once
    values.view(np.uint32)[-1, -1] = bits
    assert packer._narrowest([ones, InMemory(values)]) == held


def test_weights_packed_for_other_options_are_passed_over_with_one_line(
    checkpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = export(checkpoint, tmp_path / "export", options("bfloat16"), with_plain=True)
    with caplog.at_level(logging.INFO):
        assert logits(made, options("float32")) == logits(checkpoint, options("float32"))
    lines = [record.message for record in caplog.records if "packed for" in record.message]
    assert len(lines) == 1
    assert "dtype bfloat16 and not float32" in lines[0]


@pytest.mark.parametrize(
    ("written", "wanted", "line"),
    [("float32", "int8", "activations None and not int8"), ("int8", "float32", "activations int8 and not None")],
)
def test_int8_weights_packed_for_the_other_activations_are_packed_again(
    written: str, wanted: str, line: str, checkpoint: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    how = options("float32", "int8", activations=wanted)
    made = export(checkpoint, tmp_path / "export", options("float32", "int8", activations=written), with_plain=True)
    with caplog.at_level(logging.INFO):
        assert logits(made, how) == logits(checkpoint, how)
    assert [line in record.message for record in caplog.records if "packed for" in record.message] == [True]


@pytest.mark.parametrize("at", [10, 5000, -1])
def test_a_damaged_file_is_named_and_not_loaded(checkpoint: str, tmp_path: Path, at: int) -> None:
    made = export(checkpoint, tmp_path / "export", options())
    path = next((tmp_path / "export" / "packed").iterdir())
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    with pytest.raises(LoadError, match=r"is damaged: its checksum") as caught:
        CpuDevice().load(made, options())
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_the_plain_files_of_an_export_are_checked_too(checkpoint: str, tmp_path: Path, name: str) -> None:
    made = export(checkpoint, tmp_path / "export", options("bfloat16"), with_plain=True)
    (tmp_path / "export" / name).write_bytes((tmp_path / "export" / name).read_bytes()[:-1] + b" ")
    with pytest.raises(LoadError, match=f"{name} is damaged"):
        CpuDevice().load(made, options("float32"))


def test_a_missing_file_is_named(checkpoint: str, tmp_path: Path) -> None:
    made = export(checkpoint, tmp_path / "export", options())
    next((tmp_path / "export" / "packed").iterdir()).unlink()
    with pytest.raises(LoadError, match=r"avx|base.*cannot be read \(No such file"):
        CpuDevice().load(made, options())


def test_a_damaged_manifest_is_named(checkpoint: str, tmp_path: Path) -> None:
    made = export(checkpoint, tmp_path / "export", options())
    path = tmp_path / "export" / "neuronserve.json"
    path.write_text(path.read_text()[:-20])
    with pytest.raises(LoadError, match=r"neuronserve\.json is damaged"):
        CpuDevice().load(made, options())


GOLDEN = {
    "avx512": {
        "float32 None": "b74cb504e4c026cf",
        "bfloat16 None": "f658da994a39b2d5",
        "float32 int8": "9b2f1805f9fea831",
        "float16 int8": "5f7a3da5884c9711",
        "float32 int8 activations": "301accc1bcdabbeb",
        "float32 of torch.bfloat16": "efc550f429b77b8c",
        "float32 of torch.float16": "40a2bf478e835b08",
        "float32 of 24 bits": "9240beaddab0ea03",
    },
    "avx2": {
        "float32 None": "d0490e1b7cd9fadd",
        "bfloat16 None": "d99eff93100d1031",
        "float32 int8": "6357eba9316ba25f",
        "float16 int8": "92663171e55d8000",
        "float32 int8 activations": "21b56eeb2c874814",
        "float32 of torch.bfloat16": "54133c1a299b4bba",
        "float32 of torch.float16": "7dea2e5bdc8c9968",
    },
}
GOLDEN["base"] = GOLDEN["avx2"]  # panels of as many channels; AArch64 keeps the narrow ones of them
"""Digests of what `LAYOUT` stands for: where one changes, raise `LAYOUT`, or exports would be misread."""


def digest(file: bytes) -> str:
    """Of all but the key, which names the processor's other habits too."""
    (size,) = struct.unpack("<Q", file[:8])
    header = json.loads(file[8 : 8 + size])
    del header["__metadata__"]
    return hashlib.sha256(json.dumps(header).encode() + file[8 + size :]).hexdigest()[:16]


@pytest.mark.parametrize("isa", GOLDEN)
def test_the_layout_has_not_changed_under_its_number(checkpoint: str, tmp_path: Path, isa: str) -> None:
    try:
        session = Session(1, isa)
    except NativeMissing as error:
        pytest.skip(f"not on this processor: {error}")
    found = {}

    def note(name: str, directory: str, how: DeviceOptions) -> None:
        entry = packed.write_packed(directory, how, tmp_path, session)
        found[name] = digest((tmp_path / entry.file).read_bytes())

    for dtype, quantization, head, activations in FORMS:
        name = f"{dtype} {quantization}{' activations' * (activations == 'int8')}"
        note(name, checkpoint, options(dtype, quantization, head, activations))
    for kind in (torch.bfloat16, torch.float16) if session.keeps("bfloat16") else ():
        (tmp_path / str(kind)).mkdir()
        narrow, _ = stored_as(kind, checkpoint, tmp_path / str(kind))
        note(f"float32 of {kind}", narrow, options())
    if session.keeps("float24"):
        note("float32 of 24 bits", without_last_byte(checkpoint, tmp_path / "short"), options())
    assert packed.LAYOUT == 2
    assert found == {name: GOLDEN[isa][name] for name in found}


def random_bytes(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, count, np.uint8)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 3 << 20, (3 << 20) + 5])
def test_the_checksum_sees_every_flipped_bit_and_every_length(size: int) -> None:
    data = random_bytes(size)
    before = checksum.digest(data)
    assert checksum.digest(np.append(data, np.uint8(0))) != before
    for at in (0, size // 2, size - 1):
        if size:
            changed = data.copy()
            changed[at] ^= 0x80
            assert checksum.digest(changed) != before


def test_the_checksum_sees_pieces_that_changed_places() -> None:
    data = random_bytes(4 << 20)
    swapped = np.concatenate([data[1 << 20 : 2 << 20], data[: 1 << 20], data[2 << 20 :]])
    rows = data.copy()
    rows[:4096], rows[4096:8192] = data[4096:8192], data[:4096]
    assert len({checksum.digest(each) for each in (data, swapped, rows)}) == 3
