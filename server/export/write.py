"""A model in, a directory out that can be served, moved and shared as it is.

    ExportRequest ── resolve ──▶ NeuronConfig ── files, weights, settings, manifest ──▶ OUT

The directory is made beside its place and moved there whole: whoever finds OUT finds all of it. In it are the
checkpoint's files as they were, so that any tool can read it, and the weights once more in the device's own layout.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from neuronserve.neuron_worker.config import NeuronConfig, ServeRequest
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.export_graphs import write_graphs
from neuronserve.neuron_worker.exported import NEURON_CONFIG, ExportSettings, read_manifest, read_settings
from neuronserve.neuron_worker.exporting import package_version, write_manifest, write_weights
from neuronserve.neuron_worker.model_files import UNWANTED, WANTED, config_directory, local_directory
from neuronserve.neuron_worker.resolve import resolve

from . import elsewhere

LONGEST_BY_DEFAULT = 4096
_COPIED = (*WANTED, "LICENSE*", "NOTICE*")
_SNAPSHOT = re.compile(r"snapshots/([0-9a-f]{40})/?$")

Say = Callable[[str], None]


@dataclass(frozen=True)
class ExportRequest:
    """What was asked for; None: not asked. Filled by the command line."""

    model: str
    output: Path
    batch_size: int = 1
    sequence_length: int | None = None
    num_cores: int = 1
    auto_cast_type: str | None = None  # any spelling; None: the checkpoint's own
    quantization: str | None = None  # "int8"
    quantize_head: bool = False
    revision: str | None = None
    cache_dir: str | None = None
    overwrite: bool = False
    instance_type: str | None = None


def export(request: ExportRequest, environ: Mapping[str, str], say: Say) -> ExportSettings:
    """Writes `request.output`; what it was made for."""
    _check_output(request)
    _check_source(request)
    source = local_directory(request.model, request.revision, request.cache_dir)
    config = _config(request, source, environ, say)
    with _beside(request.output) as made:
        work = Path(made) / "export"
        work.mkdir()
        _copy(Path(source), work)
        packed, line = write_weights(config, source, work)
        say(line)
        _write_settings(work, config, request, source)
        write_graphs(config, request.model, source, work, environ, say)
        write_manifest(config, work, packed)
        _move(work, request.output.absolute(), Path(made) / "old")
    settings = read_settings(request.output)
    assert settings is not None
    say(f"{len(config.plan.shapes)} shapes; exported to {request.output}")
    return settings


def _check_output(request: ExportRequest) -> None:
    output = request.output
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not output.is_dir() or read_manifest(output) is None:
        raise ConfigError(f"output={str(output)!r} exists and is no export of ours: choose another, or move it away")
    if not request.overwrite:
        raise ConfigError(f"output={str(output)!r} holds an export already: choose another, or add --overwrite")


def _beside(output: Path) -> tempfile.TemporaryDirectory[str]:
    """A directory of the same file system, from which a finished export is moved in one step."""
    parent = output.absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=parent, prefix=f".{output.name}-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ConfigError(
            f"output={str(output)!r} cannot be written ({error.strerror}): choose a directory of a place that can"
        ) from None


def _check_source(request: ExportRequest) -> None:
    if request.model.startswith(("/", "./", "../", "~")) and not Path(request.model).is_dir():
        raise ConfigError(f"model={request.model!r}: no such directory; give a local directory or a hub id")
    directory = config_directory(request.model, request.revision, request.cache_dir)
    if (settings := read_settings(directory)) is not None:
        source = settings.checkpoint_id or "the checkpoint it was made from"
        raise ConfigError(f"model={request.model!r} is an export already: serve it as it is, or export {source}")


def _config(request: ExportRequest, source: str, environ: Mapping[str, str], say: Say) -> NeuronConfig:
    options: dict[str, object] = {"quantization": request.quantization or "none"}
    if request.quantize_head:
        options["quantize_head"] = True
    chip = elsewhere.options_of(request.instance_type, environ)
    if not chip and request.instance_type is not None:
        say("note: without effect here: --instance-type")
    resolution = resolve(
        ServeRequest(
            model_dir=source,
            max_model_len=request.sequence_length or min(LONGEST_BY_DEFAULT, _longest(source)),
            max_num_seqs=request.batch_size,
            tensor_parallel_size=request.num_cores,
            dtype=request.auto_cast_type or "auto",
            options=options | chip,
        ),
        environ,
    )
    say(resolution.device)
    for line in (*resolution.warnings, *resolution.notes):
        say(line)
    return resolution.config


def _longest(source: str) -> int:
    config = json.loads((Path(source) / "config.json").read_text(encoding="utf-8"))
    found = [config.get(key) for key in ("max_position_embeddings", "n_positions")]
    return next((value for value in found if isinstance(value, int)), LONGEST_BY_DEFAULT)


def _copy(source: Path, work: Path) -> None:
    for path in sorted(source.iterdir()):
        wanted = any(fnmatch(path.name, pattern) for pattern in _COPIED)
        if path.is_file() and wanted and not any(fnmatch(path.name, pattern) for pattern in UNWANTED):
            shutil.copyfile(path, work / path.name)  # of a hub's snapshot too, whose files are links


def _write_settings(work: Path, config: NeuronConfig, request: ExportRequest, source: str) -> None:
    """Every key is one that optimum-neuron's own class takes; what is ours alone is in the manifest."""
    snapshot = _SNAPSHOT.search(Path(source).as_posix())
    values: dict[str, Any] = {
        "_serialized_key": "NxDNeuronConfig",
        "optimum_neuron_version": f"neuronserve-{package_version()}",
        "neuronxcc_version": "none",  # nothing that optimum-neuron loads was made by a compiler
        "checkpoint_id": None if Path(request.model).is_dir() else request.model,
        "checkpoint_revision": snapshot[1] if snapshot else None,
        "batch_size": config.max_num_seqs,
        "max_batch_size": config.max_num_seqs,
        "continuous_batching": config.max_num_seqs > 1,
        "sequence_length": config.max_model_len,
        "max_context_length": config.max_model_len,
        "n_active_tokens": config.max_model_len,
        "tp_degree": config.tensor_parallel_size,
        "ep_degree": 1,
        "pp_degree": 1,
        "start_rank_id": 0,
        "local_ranks_size": config.tensor_parallel_size,
        "torch_dtype": config.dtype,
        "speculation_length": 0,
        "output_logits": False,
        "on_device_sampling": config.sampling == "device",
        "fused_qkv": True,
    }
    (work / NEURON_CONFIG).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _move(work: Path, output: Path, old: Path) -> None:
    """Into place; an export that was there leaves it first, and comes back if that fails."""
    had_one = output.exists() and any(output.iterdir())
    if had_one:
        os.replace(output, old)
    try:
        os.replace(work, output)
    except OSError:
        if had_one:
            os.replace(old, output)
        raise
