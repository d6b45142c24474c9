"""The key and the places of the server that a request would start: what `neuronserve cache lookup` asks about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from neuronserve.neuron_worker.artifact_key import artifact_key
from neuronserve.neuron_worker.config import ServeRequest
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.kept_graphs import graph_places
from neuronserve.neuron_worker.machine import ask_interpreter
from neuronserve.neuron_worker.resolve import resolve

from .key import ArtifactKey
from .places import Places


def wanted(
    request: ServeRequest, environ: Mapping[str, str], artifacts: str | None, cache_url: str | None
) -> tuple[ArtifactKey, Places]:
    """`artifacts` and `cache_url` come before the request's own. A lookup never needs what it looks for."""
    given = {"artifacts": artifacts, "cache_url": cache_url, "require_cached": False}
    chosen = {name: value for name, value in given.items() if value is not None}
    config = resolve(replace(request, options={**request.options, **chosen}), environ).config
    if not config.capabilities.saves_graphs:
        raise ConfigError(
            f"the {config.backend} device keeps no compiled graphs, so there is nothing to look up; "
            "--neuronserve.backend transformers-neuronx asks for a chip's"
        )
    key = artifact_key(config, request.model_dir, ask_interpreter(config.device_python), environ)
    return key, graph_places(config, environ, request.model_dir)
