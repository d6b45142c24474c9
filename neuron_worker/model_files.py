"""A model's name to a directory on this machine: a local path as it is, a hub id fetched into the hub's cache."""

from __future__ import annotations

from pathlib import Path

from .errors import ConfigError

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
UNWANTED = ["consolidated*", "original/*", "onnx/*"]
"""The same weights once more, in forms that nothing here reads."""


def local_directory(model: str, revision: str | None = None, download_dir: str | None = None) -> str:
    if Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download

    return snapshot_download(
        model, revision=revision, cache_dir=download_dir, allow_patterns=WANTED, ignore_patterns=UNWANTED
    )


def config_directory(model: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Where the model's config.json is, nothing else of it fetched."""
    if Path(model).is_dir():
        return model
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(model, "config.json", revision=revision, cache_dir=download_dir)
    except Exception as error:  # the hub's own errors have no common base
        why = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"model={model!r} is no local directory, and the hub says: {why}") from None
    return str(Path(path).parent)
