"""A model's name to a directory on this machine: a local path as it is, a hub id fetched into the hub's cache.

Of somebody else's export the weights are in its `checkpoint/`, or where its settings say that they came from.
"""

from __future__ import annotations

from pathlib import Path

from neuronserve.server.cache.places import GRAPHS_OF_EXPORT

from .device.manifest import MANIFEST
from .errors import ConfigError
from .exported import NEURON_CONFIG, ExportSettings, read_settings

WANTED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", f"{GRAPHS_OF_EXPORT}/*"]
UNWANTED = ["consolidated*", "original/*", "onnx/*"]
"""The same weights once more, in forms that nothing here reads."""


def local_directory(model: str, revision: str | None = None, download_dir: str | None = None) -> str:
    """Where the model's weights are."""
    return weights_directory(_snapshot(model, revision, download_dir), download_dir)


def weights_directory(directory: str, download_dir: str | None = None) -> str:
    """`directory` itself, but for an export that keeps its weights elsewhere."""
    settings = read_settings(directory)
    if settings is None or settings.is_ours:
        return directory
    for place in (Path(directory) / "checkpoint", Path(directory)):
        if any(place.glob("*.safetensors")):
            return str(place)
    return _source(directory, settings, download_dir)


def check_weights(directory: str, download_dir: str | None = None) -> None:
    """Somebody else's export whose weights are not to be had is refused here, before anything is loaded."""
    if (settings := read_settings(directory)) is not None and not settings.is_ours:
        weights_directory(directory, download_dir)


def _source(directory: str, settings: ExportSettings, download_dir: str | None) -> str:
    name, revision = settings.checkpoint_id, settings.checkpoint_revision
    remedy = f"copy the checkpoint's config.json and safetensors files to {Path(directory) / 'checkpoint'}"
    if name is None:
        raise ConfigError(
            f"the export in {directory} has no weights and does not say which checkpoint they came from: {remedy}"
        )
    try:
        return _snapshot(name, revision, download_dir)
    except Exception as error:  # the hub's own errors have no common base
        raise ConfigError(
            f"the export in {directory} has no weights, and its checkpoint_id {name} at checkpoint_revision {revision} "
            f"is not to be had ({_in_one_line(error)}): go online, or {remedy}"
        ) from None


def _snapshot(model: str, revision: str | None, download_dir: str | None) -> str:
    if Path(model).is_dir():
        return model
    from huggingface_hub import snapshot_download

    return snapshot_download(
        model, revision=revision, cache_dir=download_dir, allow_patterns=WANTED, ignore_patterns=UNWANTED
    )


def export_settings(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> tuple[str, ExportSettings] | None:
    """(directory, settings) where the model is an export; of a hub model the few files that say so are fetched."""
    if Path(model).is_dir():
        settings = read_settings(model)
        return None if settings is None else (model, settings)
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    found = None
    for name in ("config.json", NEURON_CONFIG, MANIFEST):
        try:
            found = hf_hub_download(model, name, revision=revision, cache_dir=download_dir)
        except EntryNotFoundError:
            if name == "config.json":
                return None  # vLLM says better what is wrong with such a name
        except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled):
            return None
    directory = str(Path(found).parent) if found else model
    settings = read_settings(directory)
    return None if settings is None else (directory, settings)


def check_path(key: str, model: object) -> None:
    """A path that leads nowhere; vLLM would take it for the name of a repository and say that it is a wrong one."""
    if isinstance(model, str) and model.startswith(("/", "./", "../", "~")) and not Path(model).exists():
        raise ConfigError(f"{key}={model!r}: no such directory; give a local directory or a hub id")


def config_directory(
    model: str, revision: str | None = None, download_dir: str | None = None, *, key: str = "model"
) -> str:
    """Where the model's config.json is, nothing else of it fetched."""
    if Path(model).is_dir():
        return model
    from huggingface_hub import hf_hub_download

    try:
        path = hf_hub_download(model, "config.json", revision=revision, cache_dir=download_dir)
    except Exception as error:  # the hub's own errors have no common base
        why = _in_one_line(error)
        raise ConfigError(f"{key}={model!r} is no local directory, and the hub says: {why}") from None
    return str(Path(path).parent)


def _in_one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
