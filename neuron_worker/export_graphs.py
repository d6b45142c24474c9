"""The compiled graphs of an export: made on the chip's own machine, found by a start from the directory.

    write_graphs(config, model, source, directory) ── the device up once ──▶ one entry in directory/compiled-graphs

The entry is what the cache would keep, under the same key, and read with the same checks; a start with other settings,
or another compiler, misses it with the reason and compiles. Where nothing can be compiled one line says why. Knows
neither vLLM nor a backend.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from neuronserve.server.cache.cache import Cache
from neuronserve.server.cache.errors import CacheUnavailable
from neuronserve.server.cache.manifest import describe
from neuronserve.server.cache.places import GRAPHS_OF_EXPORT
from neuronserve.server.cache.store import Store

from .artifact_key import artifact_key
from .config import NeuronConfig
from .device.errors import DeviceError
from .errors import ConfigError
from .kept_graphs import graph_places
from .machine import ask_interpreter, has_device
from .warmup import warm_up

LATER = "; export again there with --overwrite to have them in the directory"
NO_DEVICE = (
    "note: no Neuron device on this machine: nothing is compiled; the export is for the {} device, which compiles at "
    "its first start on a chip or finds its graphs in the cache"
)
OF_THE_SDK = (
    "note: nothing is compiled: the {} device's graphs stay in its SDK's own cache, so its first start compiles"
)

Say = Callable[[str], None]


def write_graphs(
    config: NeuronConfig, model: str, source: str, directory: Path, environ: Mapping[str, str], say: Say
) -> None:
    """`model`: its name, for people. `source`: where its checkpoint is."""
    capabilities = config.capabilities
    if not capabilities.on_chip:
        return
    if not has_device():
        say(NO_DEVICE.format(config.backend) + (LATER if capabilities.saves_graphs else ""))
    elif not capabilities.saves_graphs:
        say(OF_THE_SDK.format(config.backend))
    else:
        _compile(config, model, source, directory, environ, say)


def _compile(
    config: NeuronConfig, model: str, source: str, directory: Path, environ: Mapping[str, str], say: Say
) -> None:
    key = artifact_key(config, source, ask_interpreter(config.device_python), environ)
    cache, about = Cache(graph_places(config, environ)), {"model": model}
    with tempfile.TemporaryDirectory(prefix="neuronserve-export-") as scratch:
        graphs = Path(scratch) / "graphs"
        graphs.mkdir()
        lines = cache.bring(key, graphs).lines if cache.places.local is not None else ()
        try:
            _bring_up(config, source, graphs, cache.places.compiler_cache, say)
        except DeviceError as error:
            say(f"note: nothing is compiled, for the device does not come up: {error}")
            return
        manifest = describe(graphs, key, about)
        if not manifest.files:
            say(f"note: the {config.backend} device saved no graphs, so the first start compiles")
            return
        try:
            Store(str(directory / GRAPHS_OF_EXPORT)).publish(manifest, graphs)
        except CacheUnavailable as error:
            raise ConfigError(f"output: compiled graphs cannot be written: {error}; choose a place that can") from None
        for line in (*lines, *cache.keep(key, graphs, about)):
            say(line)
    say(f"compiled graphs {key.name} are in the export: {len(manifest.files)} files, {manifest.size} bytes")


def _bring_up(config: NeuronConfig, source: str, graphs: Path, compiler_cache: str | None, say: Say) -> None:
    """As a server does until it is ready."""
    blocks = -(-config.max_model_len // config.block_size)
    device = config.create_device()
    try:
        device.load(source, replace(config.device_options(), artifacts=str(graphs), compiler_cache=compiler_cache))
        device.allocate(1 + config.max_num_seqs * blocks)
        warm_up(device, config.plan.shapes, say)
    finally:
        device.close()
