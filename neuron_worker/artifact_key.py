"""What decides this server's compiled graphs: configuration, model, shapes, the SDK where the device runs.

    artifact_key(config, model_dir, sdk, environ) ──▶ ArtifactKey

The same for a server and for `neuronserve cache lookup`. Weights are no part of it: they are inputs of a graph, so a
model and its fine-tunes share one. How a step travels to a device in another process is no part of it either: of the
types that cross, those that shape a graph (shapes, options) are here by their values. What the backend's code makes of
them is in the name of its folder within an entry (`artifacts.identity`), so a change there compiles anew by itself.
Imports neither vLLM nor torch nor an SDK.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from neuronserve.server.cache.key import ArtifactKey

from .config import NeuronConfig
from .device.environment import compiler_flags
from .device.errors import DeviceError
from .device.transformers_neuronx.artifacts import NOT_COMPILED_IN
from .errors import ConfigError
from .machine import Interpreter
from .warmup import describe

COMPILER = "neuronx-cc"


def artifact_key(config: NeuronConfig, model_dir: str, sdk: Interpreter, environ: Mapping[str, str]) -> ArtifactKey:
    if sdk.problem is not None:  # as if nothing were installed, every graph would miss
        raise ConfigError(sdk.refusal)
    packages = dict(sdk.packages)
    return ArtifactKey(
        backend=config.backend,
        model=_model(model_dir),
        shapes=tuple(describe(shape) for shape in config.plan.shapes),
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        dtype=config.dtype,
        quantization=config.quantization,
        quantize_head=config.quantize_head,
        sampling=config.sampling,
        tensor_parallel_size=config.tensor_parallel_size,
        neuron_config=dict(config.overrides),
        compiler=f"{COMPILER} {packages.pop(COMPILER, 'not installed')}",
        compiler_flags=_flags(environ),
        libraries=packages,
    )


def _model(model_dir: str) -> dict[str, Any]:
    values = json.loads((Path(model_dir) / "config.json").read_text(encoding="utf-8"))
    return {name: value for name, value in values.items() if name not in NOT_COMPILED_IN}


def _flags(environ: Mapping[str, str]) -> tuple[str, ...]:
    try:
        return compiler_flags(environ)
    except DeviceError as error:
        raise ConfigError(str(error)) from None
