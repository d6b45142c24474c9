"""The graphs of an export for a chip, on the classic library's stand-in: made once, and found by starts from it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker import export_graphs, kept_graphs
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.model_files import WANTED
from neuronserve.server.cli import main

from .engine import Engine, greedy
from .tiny_model import VOCAB_SIZE, tiny_model

FAKES = str(Path(__file__).resolve().parents[1] / "fakes")
NAME = "transformers_neuronx"
ON_CHIP = {"backend": "transformers-neuronx"}
FLAGS = ["--batch-size", "2", "--sequence-length", "128"]
COMPILED, LOADED = ["to_neuron", "save"], ["load", "to_neuron"]


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.setenv("NEURON_RT_NUM_CORES", "2")
    monkeypatch.setenv("NEURONSERVE_BACKEND", "transformers-neuronx")
    for name in ("HF_HOME", "HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "CUSTOM_CACHE_REPO", "NEURON_COMPILE_CACHE_URL"):
        monkeypatch.setenv(name, "")  # what the engine sets is undone with it
    monkeypatch.setattr(export_graphs, "has_device", lambda: True)
    yield import_module(f"{NAME}.chip")
    for name in [name for name in sys.modules if name.split(".")[0] == NAME]:
        del sys.modules[name]


@pytest.fixture
def asked(chip: Any) -> Callable[[], list[str]]:
    """What the library was asked to do since the last time."""

    def take() -> list[str]:
        verbs = [verb for _, verb in chip.calls if verb in ("load", "save", "to_neuron")]
        chip.calls.clear()
        return verbs

    return take


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a start says about its graphs."""
    said: list[str] = []
    monkeypatch.setattr(kept_graphs.logger, "info", lambda text, *values: said.append(text % values))
    return said


@pytest.fixture
def exported(chip: Any, tmp_path: Path) -> Path:
    model = tiny_model(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert main(["export", model, str(tmp_path / "out"), *FLAGS]) == 0
    return tmp_path / "out"


def start(model: Path, **options: Any) -> None:
    engine = Engine(str(model), options={**ON_CHIP, **options}, max_num_seqs=2)
    answers = import_module(f"{NAME}.answers")
    assert engine.tokens_of([5, 6, 7], greedy(3)) == answers.greedy([5, 6, 7], 3, VOCAB_SIZE)


def test_the_first_start_from_an_export_compiles_nothing(
    exported: Path, asked: Callable[[], list[str]], lines: list[str]
) -> None:
    assert asked() == COMPILED
    start(exported)
    assert asked() == LOADED
    [line] = [line for line in lines if line.startswith("compiled graphs ")]
    assert f" from {exported}/compiled-graphs: " in line


def test_they_are_found_there_before_the_cache_and_wherever_it_was_moved(
    exported: Path, asked: Callable[[], list[str]], lines: list[str], tmp_path: Path
) -> None:
    moved = exported.rename(tmp_path / "moved")
    asked()
    for _ in range(2):
        start(moved, artifacts=str(tmp_path / "kept"), require_cached=True)
        assert asked() == LOADED
        assert [line for line in lines if f" from {moved}/compiled-graphs: " in line]
        lines.clear()


def test_they_are_all_that_a_start_needs_which_may_not_compile(
    exported: Path, asked: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked()
    start(exported, require_cached=True)
    assert asked() == LOADED
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    with pytest.raises(ConfigError, match=r"require_cached: no compiled graphs for .* differs: compiler_flags is"):
        start(exported, require_cached=True)
    assert asked() == []


def test_a_mirror_that_cannot_be_written_does_not_hide_them(
    exported: Path, asked: Callable[[], list[str]], tmp_path: Path
) -> None:
    asked()
    (tmp_path / "file").touch()
    start(exported, artifacts=str(tmp_path / "file"))
    assert asked() == LOADED


def test_other_settings_are_a_miss_that_says_why(
    exported: Path, asked: Callable[[], list[str]], lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked()
    monkeypatch.setenv("NEURON_CC_FLAGS", "-O1")
    start(exported)
    assert asked()[0] == "to_neuron"
    assert any('differs: compiler_flags is ["-O1"] here and [] there' in line for line in lines)


@pytest.mark.parametrize("part", ["blobs/*/*", "manifests/*"])
def test_damage_is_never_loaded_and_left_where_it_is(
    exported: Path, asked: Callable[[], list[str]], lines: list[str], part: str
) -> None:
    asked()
    spoilt = [path for path in (exported / "compiled-graphs" / "v1").glob(part) if path.is_file()]
    assert spoilt
    for path in spoilt:
        path.write_bytes(b"rot")
    start(exported)
    assert asked()[0] == "to_neuron"
    assert any("its entry is damaged" in line for line in lines)
    assert all(path.read_bytes() == b"rot" for path in spoilt)
    assert not (exported / "compiled-graphs" / "v1" / "quarantine").exists()


def test_what_the_cache_has_is_not_compiled_for_an_export(
    exported: Path, asked: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HUGGINGFACE_HUB_CACHE", str(tmp_path / "data"))
    checkpoint = str(tmp_path / "checkpoint")
    asked()
    assert main(["export", checkpoint, str(tmp_path / "one"), *FLAGS]) == 0
    assert asked() == COMPILED
    assert main(["export", checkpoint, str(tmp_path / "two"), *FLAGS]) == 0
    assert asked() == LOADED
    start(tmp_path / "two")
    assert asked() == LOADED


def test_a_lookup_finds_them(exported: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["cache", "lookup", str(exported), "--neuronserve.backend", "transformers-neuronx"]) == 0
    assert f" from {exported}/compiled-graphs: " in capsys.readouterr().out


def test_a_hub_repository_s_come_with_the_model() -> None:
    for path in ("compiled-graphs/v1/manifests/0.json", "compiled-graphs/v1/blobs/00/0011"):
        assert any(fnmatch(path, pattern) for pattern in WANTED)


def test_every_file_of_them_is_in_the_export_s_manifest(exported: Path) -> None:
    files = json.loads((exported / "neuronserve.json").read_text())["files"]
    graphs = {path.relative_to(exported).as_posix() for path in (exported / "compiled-graphs").rglob("*")}
    assert {name for name in files if name.startswith("compiled-graphs/")} == {
        name for name in graphs if (exported / name).is_file()
    }


def no_cores(*arguments: object) -> None:
    raise RuntimeError("nrt_init: cores are taken by another process")


@pytest.mark.parametrize("has_device", [False, True])
def test_where_nothing_can_be_compiled_one_line_says_why(
    chip: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, has_device: bool
) -> None:
    monkeypatch.setattr(export_graphs, "has_device", lambda: has_device)
    monkeypatch.setattr(chip, "Chip", no_cores)
    model = tiny_model(tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert main(["export", model, str(tmp_path / "out"), *FLAGS]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "nothing is compiled" in line]
    assert len(lines) == 1
    assert lines[0].startswith(
        "note: nothing is compiled, for the device does not come up: " if has_device else "note: no Neuron device on"
    )
    assert not (tmp_path / "out" / "compiled-graphs").exists()
