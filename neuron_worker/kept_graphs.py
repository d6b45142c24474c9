"""A server's compiled graphs: looked up before the device loads, kept once all of them are compiled.

    open ── directory for the device ── … load, compile, seal … ── close ──▶ new graphs are in the cache

The device gets a plain directory of this machine, filled with verified copies and gone after the warm-up; it knows of
no cache. Where nothing is kept both verbs do nothing. Knows neither vLLM nor a backend.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from neuronserve.server.cache.key import ArtifactKey
from neuronserve.server.cache.places import Places, places

from . import foreign_graphs
from .artifact_key import artifact_key
from .config import NeuronConfig
from .errors import ConfigError
from .machine import ask_interpreter

if TYPE_CHECKING:
    from neuronserve.server.cache.cache import Brought

logger = logging.getLogger(__name__)

WORK = "work"
"""Folder of the directories that devices have at hand."""


class KeptGraphs:
    """`key` is made when it is first needed: that asks the device's interpreter."""

    def __init__(
        self,
        where: Places,
        key: Callable[[], ArtifactKey],
        about: Mapping[str, str],
        *,
        require_cached: bool = False,
        compiler_cache: str | None = None,
        offer: Callable[[Path], str] | None = None,
    ) -> None:
        """`offer` puts graphs that came with the model into the device's directory, and says what it did."""
        self._places, self._make_key, self._about = where, key, about
        self._require_cached, self._offer = require_cached, offer
        self.compiler_cache = compiler_cache  # directory for what the compiler keeps by itself
        self._key: ArtifactKey | None = None
        # One directory for all of a server's devices: what an SDK remembers of it stays true after a restart.
        self._directory = None if where.local is None else where.local / WORK / uuid.uuid4().hex

    def open(self) -> str | None:
        """The device's directory, with the graphs in it if there are any. `ConfigError` where there must be."""
        if self._directory is None or self._places.local is None:
            return self._for_what_came_along()
        try:
            brought = self._bring(self._directory)
        except OSError as error:
            if self._require_cached:
                raise ConfigError(f"require_cached: {self._places.local} cannot be used: {error}") from None
            logger.warning("compiled graphs are neither looked up nor kept: %s", error)
            self._directory = None
            return self._for_what_came_along()
        if not brought.found:
            self._take_what_came_along(self._directory)
        self._check_required(self._directory, brought.lines)
        return str(self._directory)

    def _check_required(self, directory: Path, lines: Sequence[str]) -> None:
        if self._require_cached and not any(directory.iterdir()):
            self.discard()
            raise ConfigError(
                f"require_cached: {'; '.join(lines)}. Start once without it, or fill the cache with "
                "`neuronserve cache pull`"
            )

    def _bring(self, directory: Path) -> Brought:
        from neuronserve.server.cache.cache import Cache

        self._key = self._key or self._make_key()
        brought = Cache(self._places).bring(self._key, directory)
        for line in brought.lines:
            logger.info("%s", line)
        return brought

    def _for_what_came_along(self) -> str | None:
        """A directory for it alone, where nothing is kept."""
        if self._offer is None and self._places.export is None:
            return None
        self.discard()
        self._directory = Path(tempfile.mkdtemp(prefix="neuronserve-"))
        lines = () if self._places.export is None else self._bring(self._directory).lines
        self._take_what_came_along(self._directory)
        self._check_required(self._directory, lines)
        if not any(self._directory.iterdir()):
            self.discard()
            return None
        return str(self._directory)

    def _take_what_came_along(self, directory: Path) -> None:
        if self._offer is None:
            return
        try:
            logger.info("%s", self._offer(directory))
        except OSError as error:
            logger.warning("the export's compiled files are not reused but compiled again: %s", error)

    def close(self) -> None:
        """All graphs are compiled."""
        if self._directory is None:
            return
        if self._key is not None:
            self._keep(self._key, self._directory)
        self.discard()

    def _keep(self, key: ArtifactKey, directory: Path) -> None:
        from neuronserve.server.cache.cache import Cache

        try:
            for line in Cache(self._places).keep(key, directory, self._about):
                logger.info("%s", line)
        except OSError as error:
            logger.warning("compiled graphs were not kept: %s", error)

    def discard(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


def kept_graphs(
    config: NeuronConfig,
    model: str,
    model_dir: str,
    environ: Mapping[str, str],
    *,
    revision: str | None = None,
    download_dir: str | None = None,
) -> KeptGraphs:
    """For a device that saves its graphs; for another one, nothing is kept."""
    capabilities = config.capabilities
    where = graph_places(config, environ, model_dir) if capabilities.on_chip else Places(None)
    if where.note:
        logger.info("%s", where.note)
    found = foreign_graphs.find(config, model, revision, download_dir)
    sdk = cache(partial(ask_interpreter, config.device_python))

    def offer(directory: Path) -> str:
        assert found is not None
        return foreign_graphs.offer(found, config, sdk().packages, directory)

    return KeptGraphs(
        where if capabilities.saves_graphs else Places(None),
        lambda: artifact_key(config, model_dir, sdk(), environ),
        {"model": model},
        require_cached=config.require_cached,
        compiler_cache=where.compiler_cache,
        offer=None if found is None else offer,
    )


def graph_places(config: NeuronConfig, environ: Mapping[str, str], model_dir: str | None = None) -> Places:
    """Without the shared place where nothing here reads it and only a variable of the classic tools names it."""
    where = places(environ, config.artifacts, config.cache_url)
    where = where if model_dir is None else where.beside(model_dir)
    if where.remote is None or where.is_asked_for or not config.capabilities.saves_graphs:
        return where
    from neuronserve.server.cache.store import check_url  # loads the file systems

    try:
        check_url(where.remote_from, where.remote)
    except ConfigError as error:
        return replace(where, remote=None, note=f"{error}; compiled graphs are kept in {where.local} alone")
    return where
