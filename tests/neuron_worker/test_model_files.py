"""What of a hub repository is fetched."""

from __future__ import annotations

from huggingface_hub.utils import filter_repo_objects

from neuronserve.neuron_worker.model_files import UNWANTED, WANTED


def test_weights_come_once_and_with_everything_a_server_reads() -> None:
    needed = [
        "config.json",
        "generation_config.json",
        "chat_template.jinja",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
    ]
    others = [
        "README.md",
        "consolidated.safetensors",
        "consolidated.safetensors.index.json",
        "onnx/model.safetensors",
        "original/consolidated.00.safetensors",
        "original/params.json",
        "pytorch_model.bin",
    ]

    fetched = filter_repo_objects([*needed, *others], allow_patterns=WANTED, ignore_patterns=UNWANTED)

    assert list(fetched) == needed
