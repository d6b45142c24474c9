"""What a model's files say: an export's settings in every form, positions in every spelling."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.server.launcher.checks import warnings
from neuronserve.server.launcher.command import look as look_at_device
from neuronserve.server.launcher.command import tgi_settings
from neuronserve.server.launcher.main import settle
from neuronserve.server.launcher.model import Export, Model, look, pipeline_tag
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


def test_an_export_serves_less_than_it_was_made_for(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path)
    (tmp_path / "neuron_config.json").write_text(json.dumps(NEWER))
    environ = {"MAX_BATCH_SIZE": "2", "HF_NUM_CORES": "1", "MAX_TOTAL_TOKENS": "1024"}

    settings = settle(read(["--model-id", directory], environ))

    assert look_at_device(settings, {}).max_num_seqs == 2


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


class Hub(BaseHTTPRequestHandler):
    """Knows one model."""

    def do_GET(self) -> None:
        known = self.path == "/api/models/team/model/revision/main?expand=pipeline_tag"
        body = json.dumps({"id": "team/model", "pipeline_tag": "text2text-generation"} if known else {}).encode()
        self.send_response(200 if known else 404)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield
        server.shutdown()


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(("name", "tag"), [("team/model", "text2text-generation"), ("team/other", None)])
def test_the_tag_of_a_hub_model(name: str, tag: str | None) -> None:
    assert pipeline_tag(name, "main") == tag


def test_without_the_hub_there_is_no_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert pipeline_tag("team/model", None) is None


@pytest.mark.parametrize("tag", ["image-text-to-text", None])
def test_the_tag_reaches_the_routes_and_its_absence_is_said(tag: str | None) -> None:
    settings = settle(read([], {}), model=Model("team/model", positions=64, pipeline_tag=tag))
    assert tgi_settings(settings).model_pipeline_tag == tag
    assert ("no pipeline tag found for model team/model" in warnings(settings.model)) is (tag is None)
