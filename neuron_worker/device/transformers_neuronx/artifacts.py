"""Compiled graphs kept between starts, under a key of everything that decides them.

The library names a graph's file by what the graph computes, and neither by the compiler nor by its flags: graphs of
an older compiler would be loaded without a word. So each combination has a directory of its own. One that is there is
complete: it is written beside its place and moved there whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..environment import compiler_flags
from ..errors import LoadError

logger = logging.getLogger(__name__)

IDENTITY = "identity.json"

NOT_COMPILED_IN = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures"})
"""Of config.json: nothing a graph depends on."""


@dataclass(frozen=True)
class Artifacts:
    """Of one model. `root` None: nothing is kept."""

    root: str | None
    identity: Mapping[str, Any]  # JSON-able
    may_compile: bool = True

    def check_compiling(self, why: str) -> None:
        """Before anything is compiled."""
        if not self.may_compile:
            raise LoadError(f"{why}, and require_cached allows no compiling; start once without it")

    @property
    def key(self) -> str:
        text = json.dumps(self.identity, sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    @property
    def directory(self) -> Path | None:
        return None if self.root is None else _place(self.root, self.key)

    def found(self) -> Path | None:
        """The directory to load from, if it is there: graphs of ours, else those that came with the model."""
        directory = self.directory
        if directory is None or self.root is None:
            return None
        if (directory / IDENTITY).is_file():
            return directory
        return place if (place := offered(self.root)).is_dir() else None

    def loaded(self, directory: Path) -> None:
        """The library took them for its own; so they are, from now on."""
        if self.directory is None or directory == self.directory:
            return
        try:
            (directory / IDENTITY).write_text(self._identity_text())
            directory.replace(self.directory)
        except OSError as error:
            logger.warning("compiled graphs were not kept in %s: %s", self.directory, error)

    def keep(self, model: Any) -> None:
        """Save a compiled model's graphs. A server runs without them, so a failure is a warning, whoever's it is."""
        directory = self.directory
        if directory is None or directory.exists():
            return
        try:
            directory.parent.mkdir(parents=True, exist_ok=True)
            made = Path(tempfile.mkdtemp(prefix=f"{self.key}-", dir=directory.parent))
            try:
                model.save(str(made))
                (made / IDENTITY).write_text(self._identity_text())
                made.replace(directory)
            finally:
                shutil.rmtree(made, ignore_errors=True)
        except Exception as error:
            logger.warning("compiled graphs were not kept in %s: %s: %s", directory, type(error).__name__, error)

    def _identity_text(self) -> str:
        return json.dumps(self.identity, sort_keys=True, indent=1, default=str)


def offered(root: str | Path) -> Path:
    """Where graphs lie that came with the model: the library looks whether they are its own."""
    return _place(root, "offered")


def _place(root: str | Path, name: str) -> Path:
    return Path(root) / "transformers-neuronx" / name


def identity(
    config: Mapping[str, Any],
    neuron_config: Mapping[str, Any],
    arguments: Mapping[str, Any],
    versions: Mapping[str, str],
    environ: Mapping[str, str],
) -> dict[str, Any]:
    """Everything that decides a compiled graph."""
    return {
        "config": {name: value for name, value in config.items() if name not in NOT_COMPILED_IN},
        "neuron_config": dict(neuron_config),
        "arguments": dict(arguments),
        "versions": dict(versions),
        "flags": list(compiler_flags(environ)),
    }
