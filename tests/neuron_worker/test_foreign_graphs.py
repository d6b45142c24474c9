"""Compiled files of somebody else's export: when the library gets them, and else the line that says what differs."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker import foreign_graphs, kept_graphs, resolve
from neuronserve.neuron_worker.config import NeuronConfig, ServeRequest
from neuronserve.neuron_worker.machine import Interpreter, Machine

from .engine import Engine, greedy
from .test_kept_graphs import NAME, chip
from .tiny_model import VOCAB_SIZE, tiny_model

__all__ = ["chip"]

VERSION = "2.20.9961.0+0acef03a"
SDK = Interpreter("/sdk/python", "3.10.12", {"neuronx-cc": VERSION, "transformers-neuronx": "0.13.1216"})
MADE = {
    "batch_size": 2,
    "num_cores": 1,
    "auto_cast_type": "fp32",
    "sequence_length": 128,
    "compiler_type": "neuronx-cc",
    "compiler_version": VERSION,
}


def export(directory: Path, **made: Any) -> Path:
    """In optimum-neuron's older form, with one compiled file that is nobody's graph."""
    tiny_model(directory / "checkpoint")
    (directory / "checkpoint" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    tiny_model(directory)  # with the tokenizer beside the settings
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "neuron": {**MADE, **made}}))
    (directory / "compiled").mkdir()
    (directory / "compiled" / "0123.neff").write_bytes(b"graph")
    return directory


def configured(directory: Path, **changes: Any) -> NeuronConfig:
    request = ServeRequest(
        str(directory), max_model_len=128, max_num_seqs=2, dtype="float32", options={"backend": "transformers-neuronx"}
    )
    found = resolve.resolve(request, {"HF_HOME": "/no/home"}, Machine(devices=("/dev/neuron0",), sdk=SDK))
    assert not any("compiled" in note for note in found.notes)  # it is decided where the library is at hand
    return replace(found.config, **changes)


@pytest.mark.parametrize(
    ("made", "changes", "packages", "message"),
    [
        ({}, {}, {}, None),
        (
            {"compiler_version": "2.15.128.0+56dc5a86"},
            {},
            {},
            f"the compiler's version (neuronx-cc) is 2.15.128.0+56dc5a86 there and {VERSION} here",
        ),
        ({"compiler_version": None}, {}, {}, f"(neuronx-cc) is not said there and {VERSION} here"),
        ({}, {}, {"neuronx-cc": "2.19"}, f"(neuronx-cc) is {VERSION} there and 2.19 here"),
        ({}, {"max_num_seqs": 1}, {}, "the batch size is 2 there and 1 here"),
        ({}, {"max_model_len": 64}, {}, "the sequence length is 128 there and 64 here"),
        ({}, {"tensor_parallel_size": 2}, {}, "the number of cores is 1 there and 2 here"),
        ({}, {"dtype": "bfloat16"}, {}, "the type is float32 there and bfloat16 here"),
        ({}, {"quantization": "int8"}, {}, "quantization is not said there and int8 here"),
    ],
)
def test_what_differs_is_named(
    tmp_path: Path, made: dict[str, Any], changes: dict[str, Any], packages: dict[str, str], message: str | None
) -> None:
    directory = export(tmp_path / "export", **made)
    config = configured(directory, **changes)
    found = foreign_graphs.find(config, str(directory), None, None)
    assert found is not None
    said = foreign_graphs.offer(found, config, {**SDK.packages, **packages}, tmp_path / "device")
    offered = list((tmp_path / "device").rglob("*.neff"))
    if message is None:
        assert said.startswith("1 compiled files of the export are for the same neuronx-cc")
        assert [file.name for file in offered] == ["0123.neff"]
    else:
        assert said.startswith("the export's compiled files are not reused but compiled again: ")
        assert message in said
        assert offered == []


def test_nothing_to_decide(tmp_path: Path) -> None:
    directory = export(tmp_path / "export")
    config = configured(directory)
    assert foreign_graphs.find(replace(config, backend="torch-neuronx"), str(directory), None, None) is None
    assert foreign_graphs.find(config, str(directory / "checkpoint"), None, None) is None
    shutil.rmtree(directory / "compiled")
    assert foreign_graphs.find(config, str(directory), None, None) is None


class Starts:
    """Of a real engine on the library's stand-in, from an export."""

    def __init__(self, chip: Any, directory: Path) -> None:
        self.chip, self.directory = chip, directory

    def __call__(self, **options: Any) -> list[str]:
        """What the library was asked to do until the engine had answered."""
        self.chip.calls.clear()
        engine = Engine(
            str(self.directory), options={"backend": "transformers-neuronx", **options}, max_num_seqs=2, dtype="float32"
        )
        answers = import_module(f"{NAME}.answers")
        assert engine.tokens_of([5, 6, 7], greedy(3)) == answers.greedy([5, 6, 7], 3, VOCAB_SIZE)
        return [verb for _, verb in self.chip.calls if verb in ("load", "save", "to_neuron")]

    def graphs_of(self, kept: Path) -> None:
        """The export's compiled files are those that a start with `artifacts=kept` made."""
        shutil.rmtree(self.directory / "compiled")
        (self.directory / "compiled").mkdir()
        for manifest in (kept / "v1" / "manifests").glob("*.json"):
            for file in json.loads(manifest.read_text())["files"]:
                if file["path"].endswith(".neff"):
                    blob = next((kept / "v1" / "blobs").rglob(file["sha256"]))
                    shutil.copy(blob, self.directory / "compiled" / Path(file["path"]).name)
        assert any((self.directory / "compiled").iterdir())


@pytest.fixture
def starts(chip: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    monkeypatch.setattr(kept_graphs, "ask_interpreter", lambda _: SDK)
    return Starts(chip, export(tmp_path / "export"))


def lines(caplog: pytest.LogCaptureFixture, word: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if word in record.getMessage()]


COMPILED, LOADED = ["to_neuron", "save"], ["load", "to_neuron"]


@pytest.mark.parametrize("is_kept", [True, False])
def test_graphs_of_the_same_library_are_loaded(starts: Starts, tmp_path: Path, is_kept: bool) -> None:
    starts(artifacts=str(tmp_path / "maker"))
    starts.graphs_of(tmp_path / "maker")
    kept = {"artifacts": str(tmp_path / "kept")} if is_kept else {}
    assert starts(**kept) == LOADED
    if is_kept:
        shutil.rmtree(starts.directory / "compiled")
        assert starts(**kept, require_cached=True) == LOADED  # they are in the cache from then on


def test_graphs_of_another_library_are_compiled_again(
    starts: Starts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert starts(artifacts=str(tmp_path / "kept")) == ["load", "to_neuron", *COMPILED]
    assert lines(caplog, "do not fit, compiling anew")
    assert starts(artifacts=str(tmp_path / "kept")) == LOADED


def test_graphs_of_another_compiler_are_not_tried(
    starts: Starts, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(starts.directory)
    export(starts.directory, compiler_version="2.15.128.0+56dc5a86")
    with caplog.at_level(logging.INFO):
        assert starts(artifacts=str(tmp_path / "kept")) == COMPILED
    (line,) = lines(caplog, "not reused but compiled again")
    assert "2.15.128.0+56dc5a86 there" in line
