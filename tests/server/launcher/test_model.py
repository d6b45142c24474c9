"""What a model's files say: an export's settings in every form, positions in every spelling."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server.launcher.main import settle
from neuronserve.server.launcher.model import Export, look
from neuronserve.server.launcher.reading import read
from tests.neuron_worker.tiny_model import tiny_model

OLDER = {
    "task": "text-generation",
    "batch_size": 4,
    "num_cores": 2,
    "auto_cast_type": "bf16",
    "sequence_length": 2048,
    "compiler_type": "neuronx-cc",
    "compiler_version": "2.15.128.0+56dc5a86",
    "checkpoint_id": "HuggingFaceH4/zephyr-7b-beta",
    "checkpoint_revision": None,
}
NEWER = {
    "_serialized_key": "NxDNeuronConfig",
    "batch_size": 4,
    "sequence_length": 2048,
    "tp_degree": 2,
    "torch_dtype": "bfloat16",
    "optimum_neuron_version": "0.3.0",
    "neuronxcc_version": "2.19.8089.0+8ab9f450",
}


@pytest.mark.parametrize("form", ["older", "newer"])
def test_an_export_needs_no_parameters(form: str, tmp_path: Path) -> None:
    directory = tiny_model(tmp_path, **({"neuron": OLDER} if form == "older" else {}))
    if form == "newer":
        (tmp_path / "neuron_config.json").write_text(json.dumps(NEWER))

    settings = settle(read(["--model-id", directory], {}))

    assert settings.model.export == Export(4, 2048, 2, "bf16")
    values = [settings.value(name) for name in ("max_num_seqs", "max_model_len", "num_cores", "dtype")]
    assert values == [4, 2048, 2, "bfloat16"]


@pytest.mark.parametrize("key", ["max_position_embeddings", "n_positions", "max_seq_len"])
def test_spellings_of_the_longest_sequence(key: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({key: 300}))
    assert look(str(tmp_path), None, None).positions == 300


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the directory of a model has a config\.json"):
        look(str(tmp_path), None, None)


def test_a_name_the_hub_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="'nobody/nothing' is no local directory, and the hub says"):
        look("nobody/nothing", None, None)
