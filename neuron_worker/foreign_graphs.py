"""Compiled graphs that came with somebody else's export: when they may be loaded, and else what differs.

    offer(graphs, directory) ── the same compiler and settings ──▶ copies for the device, and a line for the log
                             ── anything else ──▶ a line that names it, with both values

transformers-neuronx saves a graph under the digest of what it computes and loads one whose digest is that of the graph
it would compile itself, so another library's graphs are never loaded: the library compares more than a version could
tell, and compiles again. The digest says nothing of the compiler, so that is compared here. optimum-neuron records the
compiler's version and not the library's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .artifact_key import COMPILER
from .config import NeuronConfig
from .device.transformers_neuronx.artifacts import offered
from .export_rules import DTYPES, LOADABLE
from .exported import ExportSettings
from .model_files import export_settings

SAVED_BY = "transformers-neuronx"
"""The one library that saves its graphs as such files, and loads them."""


@dataclass(frozen=True)
class ForeignGraphs:
    """Of an export. Made by `find`."""

    model: str  # as it was asked for: a directory or a hub id
    directory: Path
    settings: ExportSettings
    revision: str | None = None
    download_dir: str | None = None

    def files(self) -> list[Path]:
        """Of a hub repository they are fetched now, as few are ever of use."""
        if Path(self.model).is_dir():
            return sorted(self.directory.glob(LOADABLE))
        from huggingface_hub import snapshot_download

        try:
            found = snapshot_download(
                self.model, revision=self.revision, cache_dir=self.download_dir, allow_patterns=[LOADABLE]
            )
        except Exception:  # the hub's own errors have no common base; without the files they are compiled
            return []
        return sorted(Path(found).glob(LOADABLE))


def find(config: NeuronConfig, model: str, revision: str | None, download_dir: str | None) -> ForeignGraphs | None:
    """None: the model is no such export, or its graphs are of no use to this device anyway."""
    if config.backend != SAVED_BY or (found := export_settings(model, revision, download_dir)) is None:
        return None
    directory, settings = Path(found[0]), found[1]
    if settings.is_ours or (Path(model).is_dir() and not any(directory.glob(LOADABLE))):
        return None
    return ForeignGraphs(model, directory, settings, revision, download_dir)


def offer(graphs: ForeignGraphs, config: NeuronConfig, packages: Mapping[str, str], directory: Path) -> str:
    """Into the device's `directory`, where they are fit to be tried. What was decided, for the log."""
    if (why := difference(graphs.settings, config, packages)) is not None:
        return f"the export's compiled files are not reused but compiled again: {why}"
    files = graphs.files()
    if not files:
        return f"the export has no compiled files ({LOADABLE}); its graphs are compiled"
    place = offered(directory)
    place.mkdir(parents=True)
    for file in files:
        shutil.copy(file, place / file.name)
    return (
        f"{len(files)} compiled files of the export are for the same {COMPILER} {packages[COMPILER]} and settings: "
        "those that are this library's own graphs are loaded"
    )


def difference(settings: ExportSettings, config: NeuronConfig, packages: Mapping[str, str]) -> str | None:
    """The first thing that makes the export's graphs others than this start's."""
    compared = (
        (f"the compiler's version ({COMPILER})", settings.compiler_version, packages.get(COMPILER)),
        ("the batch size", settings.batch_size, config.max_num_seqs),
        ("the sequence length", settings.sequence_length, config.max_model_len),
        ("the number of cores", settings.num_cores, config.tensor_parallel_size),
        ("the type", DTYPES.get(settings.auto_cast_type or ""), config.dtype),
        ("quantization", settings.quantization, config.quantization),
    )
    for name, there, here in compared:
        if there != here:
            return f"{name} is {_said(there)} there and {_said(here)} here"
    return None


def _said(value: object) -> object:
    return "not said" if value is None else value
