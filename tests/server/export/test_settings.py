"""What an export says of itself, in the three forms there are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server.export import ExportSettings, read_settings

OLDER = {
    "task": "text-generation",
    "batch_size": 4,
    "num_cores": 24,
    "auto_cast_type": "fp16",
    "sequence_length": 4096,
    "compiler_type": "neuronx-cc",
    "compiler_version": "2.15.128.0+56dc5a86",
    "checkpoint_id": "some/model",
    "checkpoint_revision": "0123",
}
NEWER = {
    "_serialized_key": "NxDNeuronConfig",
    "optimum_neuron_version": "0.4.5",
    "neuronxcc_version": "2.21.33363.0+82129205",
    "batch_size": 8,
    "max_batch_size": 8,
    "sequence_length": 2048,
    "tp_degree": 2,
    "torch_dtype": "bfloat16",
    "checkpoint_id": "some/model",
    "checkpoint_revision": "4567",
}


def written(directory: Path, name: str, values: Any) -> Path:
    (directory / name).write_text(json.dumps(values))
    return directory


def test_the_older_form(tmp_path: Path) -> None:
    assert read_settings(written(tmp_path, "config.json", {"neuron": OLDER})) == ExportSettings(
        form="config.json",
        batch_size=4,
        sequence_length=4096,
        num_cores=24,
        auto_cast_type="fp16",
        quantization=None,
        checkpoint_id="some/model",
        checkpoint_revision="0123",
        compiler_version="2.15.128.0+56dc5a86",
        library_version=None,
    )


def test_the_newer_form(tmp_path: Path) -> None:
    assert read_settings(written(tmp_path, "neuron_config.json", NEWER)) == ExportSettings(
        form="neuron_config.json",
        batch_size=8,
        sequence_length=2048,
        num_cores=2,
        auto_cast_type="bf16",
        quantization=None,
        checkpoint_id="some/model",
        checkpoint_revision="4567",
        compiler_version="2.21.33363.0+82129205",
        library_version="0.4.5",
    )


def test_the_newer_form_of_the_first_releases_names_its_cast(tmp_path: Path) -> None:
    hlo = {**NEWER, "_serialized_key": "HloNeuronConfig", "auto_cast_type": "fp32"}
    del hlo["torch_dtype"]
    settings = read_settings(written(tmp_path, "neuron_config.json", hlo))
    assert settings is not None
    assert settings.auto_cast_type == "fp32"


def test_absent_keys_of_the_newer_form_have_its_defaults(tmp_path: Path) -> None:
    settings = read_settings(written(tmp_path, "neuron_config.json", {"batch_size": None, "sequence_length": 64}))
    assert settings is not None
    assert (settings.batch_size, settings.sequence_length, settings.num_cores) == (1, 64, 1)


def test_an_ordinary_checkpoint_is_no_export(tmp_path: Path) -> None:
    assert read_settings(written(tmp_path, "config.json", {"model_type": "llama"})) is None
    assert read_settings(tmp_path / "nowhere") is None


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("config.json", {"neuron": {**OLDER, "batch_size": "4"}}, "batch_size is '4', not a whole number"),
        ("config.json", {"neuron": []}, '"neuron" is [], not an object'),
        ("neuron_config.json", {"hidden_size": 8}, "neither batch_size nor sequence_length"),
        ("neuron_config.json", {**NEWER, "torch_dtype": "int4"}, "torch_dtype is 'int4'; known are bf16"),
        ("neuron_config.json", [], "holds a list, not an object"),
    ],
)
def test_a_malformed_export_names_file_key_and_value(tmp_path: Path, name: str, values: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings(written(tmp_path, name, values))
    assert message in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
