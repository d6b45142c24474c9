"""A model's name to a directory on this machine: a local path as it is, a hub id fetched into the hub's cache."""

from __future__ import annotations

from pathlib import Path

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def local_directory(model: str, revision: str | None = None, download_dir: str | None = None) -> str:
    if Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download

    return str(snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=WANTED))


def config_directory(model: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Where the model's config.json is, nothing else of it fetched."""
    if Path(model).is_dir():
        return model
    from huggingface_hub import hf_hub_download

    return str(Path(hf_hub_download(model, "config.json", revision=revision, cache_dir=download_dir)).parent)
