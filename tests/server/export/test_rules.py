"""Serving an export: what fills, what contradicts, where the weights of other people's exports are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker import export_rules, legacy_args, tiny_checkpoint
from neuronserve.neuron_worker.config import ServeRequest
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.model_files import check_weights, local_directory
from neuronserve.neuron_worker.resolve import Resolution, resolve

from .test_settings import NEWER, OLDER


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """An export in optimum-neuron's older form, its checkpoint inside."""
    directory = tmp_path / "older"
    tiny_checkpoint.write(directory / "checkpoint")
    config = json.loads((directory / "checkpoint" / "config.json").read_text())
    made = {**OLDER, "sequence_length": 128, "num_cores": 2, "checkpoint_id": None, "checkpoint_revision": None}
    (directory / "config.json").write_text(json.dumps({**config, "neuron": made}))
    (directory / "compiled").mkdir()
    (directory / "compiled" / "0123.neff").write_bytes(b"graph")
    (directory / "compiled" / "4567.neff").write_bytes(b"graph")
    return directory


@pytest.fixture
def newer(tmp_path: Path) -> Path:
    """An export in its newer form, without weights."""
    directory = tmp_path / "newer"
    tiny_checkpoint.write(directory)
    (directory / "model.safetensors").unlink()
    (directory / "neuron_config.json").write_text(json.dumps({**NEWER, "sequence_length": 128}))
    (directory / "model.pt").write_bytes(b"graphs")
    return directory


def served(directory: Path, **asked: Any) -> Resolution:
    filled = legacy_args.translate({"model": str(directory), **asked}, {})
    return resolve(
        ServeRequest(
            model_dir=str(directory),
            max_model_len=filled["max_model_len"],
            max_num_seqs=filled["max_num_seqs"],
            tensor_parallel_size=filled["tensor_parallel_size"],
            dtype=filled["dtype"],
            options={"backend": "cpu"},
        ),
        {},
    )


def test_an_export_fills_what_was_not_asked(older: Path) -> None:
    config = served(older).config
    assert (config.max_num_seqs, config.max_model_len, config.tensor_parallel_size) == (4, 128, 2)
    assert config.dtype == "float16"


def test_less_than_the_export_holds_is_served(older: Path) -> None:
    config = served(older, max_num_seqs=2, max_model_len=64).config
    assert (config.max_num_seqs, config.max_model_len) == (2, 64)


def test_an_ordinary_checkpoint_is_left_alone(tmp_path: Path) -> None:
    keywords = {"model": tiny_checkpoint.write(tmp_path / "model"), "max_num_seqs": None, "dtype": "auto"}
    assert export_rules.fill(keywords) == keywords


@pytest.mark.parametrize(
    ("asked", "values"),
    [
        ({"max_num_seqs": 8}, ("--max-num-seqs 8", "4 sequences", "--batch-size 8")),
        ({"max_model_len": 256}, ("--max-model-len 256", "128 tokens", "--sequence-length 256")),
        ({"tensor_parallel_size": 4}, ("--tensor-parallel-size 4", "2 cores", "--num-cores 4")),
        ({"dtype": "bf16"}, ("--dtype bfloat16", "float16", "--auto-cast-type bf16")),
    ],
)
def test_a_contradiction_names_both_values_and_the_remedy(
    older: Path, asked: dict[str, Any], values: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as caught:
        served(older, **asked)
    assert all(value in str(caught.value) for value in (*values, str(older)))


def test_the_weights_of_an_older_export_are_in_its_checkpoint(older: Path) -> None:
    assert local_directory(str(older)) == str(older / "checkpoint")


def test_weights_beside_the_settings_are_taken_too(newer: Path, tmp_path: Path) -> None:
    source = Path(tiny_checkpoint.write(tmp_path / "source"))
    shutil.copy(source / "model.safetensors", newer)
    assert local_directory(str(newer)) == str(newer)


def hub_cache(root: Path, name: str, revision: str) -> Path:
    """A snapshot as huggingface_hub keeps it."""
    folder = root / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    return folder / "snapshots" / revision


def test_weights_come_from_the_recorded_checkpoint(
    newer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    revision = "4567" * 10
    (newer / "neuron_config.json").write_text(json.dumps({**NEWER, "checkpoint_revision": revision}))
    snapshot = hub_cache(tmp_path / "hub", "some/model", revision)
    tiny_checkpoint.write(snapshot)
    assert local_directory(str(newer), download_dir=str(tmp_path / "hub")) == str(snapshot)


def test_offline_and_missing_names_the_checkpoint_and_its_revision(
    newer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"checkpoint_id some/model at checkpoint_revision 4567 is not to be had"):
        check_weights(str(newer), str(tmp_path / "hub"))


def test_an_export_without_weights_and_source_says_so(newer: Path) -> None:
    (newer / "neuron_config.json").write_text(json.dumps({**NEWER, "checkpoint_id": None}))
    with pytest.raises(ConfigError, match="does not say which checkpoint they came from: copy the checkpoint"):
        check_weights(str(newer))


def test_a_hub_id_whose_snapshot_is_an_export(tmp_path: Path, older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = hub_cache(tmp_path / "hub", "some/export", "89ab" * 10)
    shutil.copytree(older, snapshot)
    filled = export_rules.fill({"model": "some/export", "download_dir": str(tmp_path / "hub")})
    assert (filled["max_num_seqs"], filled["max_model_len"], filled["dtype"]) == (4, 128, "float16")
    assert local_directory("some/export", None, str(tmp_path / "hub")) == str(snapshot / "checkpoint")


def test_why_compiled_files_are_not_used(older: Path, newer: Path) -> None:
    notes = served(older).notes
    assert any(
        "compiled/0123.neff and 1 more) are not used: the cpu device compiles nothing" in note for note in notes
    ), notes
    assert any("(model.pt) are not used" in note for note in served(newer).notes)
