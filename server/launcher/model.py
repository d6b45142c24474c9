"""What a model's own files say about the limits: its longest sequence, and the settings of an export.

Reads config.json and what an export left beside it; of a hub model these few files alone are fetched, and its tag is
asked for.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.model_files import config_directory
from neuronserve.server.export import read_settings

_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_PATIENCE_S = 10  # for a tag, which serving can do without
_SNAPSHOT = re.compile(r"snapshots/([0-9a-f]{40})$")


@dataclass(frozen=True)
class Export:
    """What the files were exported for; None: the export does not say."""

    batch_size: int | None = None
    sequence_length: int | None = None
    num_cores: int | None = None
    auto_cast_type: str | None = None


@dataclass(frozen=True)
class Model:
    """Filled by `look`."""

    name: str  # as it was given
    directory: str = ""
    positions: int | None = None
    export: Export | None = None
    pipeline_tag: str | None = None  # the hub's; None: of a directory, or the hub does not say

    @property
    def is_local(self) -> bool:
        return Path(self.name).is_dir()

    @property
    def sha(self) -> str | None:
        """The hub's commit, where the files come from there."""
        found = _SNAPSHOT.search(self.directory)
        return found[1] if found else None


def look(name: str, revision: str | None, cache: str | None) -> Model:
    if name.startswith(("/", "./", "../", "~")) and not Path(name).is_dir():
        raise ConfigError(f"model_id={name!r}: no such directory; give a local directory or a hub id")
    directory = config_directory(name, revision, cache)
    config = _config(directory)
    positions = next((config[key] for key in _POSITIONS if isinstance(config.get(key), int)), None)
    if Path(name).is_dir():
        return Model(name, directory, positions, _export(directory))
    _fetch_neuron_config(name, revision, cache)
    return Model(name, directory, positions, _export(directory), pipeline_tag(name, revision))


def _config(directory: str) -> dict[str, Any]:
    path = Path(directory) / "config.json"
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}; the directory of a model has a config.json") from None
    return found if isinstance(found, dict) else {}


def _fetch_neuron_config(name: str, revision: str | None, cache: str | None) -> None:
    """Most hub models have none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled

    try:
        hf_hub_download(name, "neuron_config.json", revision=revision, cache_dir=cache)
    except (EntryNotFoundError, OfflineModeIsEnabled):
        return


def pipeline_tag(name: str, revision: str | None) -> str | None:
    """Of a hub model; None where the hub does not say."""
    from huggingface_hub import HfApi

    try:
        return HfApi().model_info(name, revision=revision, timeout=_PATIENCE_S, expand=["pipeline_tag"]).pipeline_tag
    except Exception:  # the hub's own errors have no common base, and none of them keeps the model from serving
        return None


def _export(directory: str) -> Export | None:
    settings = read_settings(directory)
    if settings is None:
        return None
    return Export(settings.batch_size, settings.sequence_length, settings.num_cores, settings.auto_cast_type)
