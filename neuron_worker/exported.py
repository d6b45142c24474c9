"""What a directory was exported for: its batch, length, cores, type and int8, and where its weights came from.

Three forms are read: optimum-neuron's older one (the object "neuron" in config.json), its newer one
(neuron_config.json), and ours: the newer one with a manifest beside it. A directory with none of them is an ordinary
checkpoint. Reads small JSON files alone; knows no vLLM.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .device.errors import LoadError
from .device.manifest import MANIFEST, Manifest
from .errors import ConfigError

CONFIG = "config.json"
NEURON_CONFIG = "neuron_config.json"
LEGACY_KEY = "neuron"

Form = Literal["neuronserve", "neuron_config.json", "config.json"]

CAST_TYPES = {
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "f16", "float16", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp32", "f32", "float32", "torch.float32"), "fp32"),
}
"""Every spelling in an export -> optimum's short one."""


@dataclass(frozen=True)
class ExportSettings:
    """Filled by `read_settings`. None: the export does not say."""

    form: Form
    batch_size: int
    sequence_length: int
    num_cores: int
    auto_cast_type: str | None  # "bf16", "fp16" or "fp32"
    quantization: str | None  # "int8"
    checkpoint_id: str | None
    checkpoint_revision: str | None
    compiler_version: str | None
    library_version: str | None  # of what wrote the export: optimum-neuron, or this package
    quantize_head: bool = False

    @property
    def is_ours(self) -> bool:
        return self.form == "neuronserve"


def read_settings(model_dir: str | Path) -> ExportSettings | None:
    """None: the directory is no export."""
    directory = Path(model_dir)
    path, manifest = directory / NEURON_CONFIG, read_manifest(directory)
    if path.is_file():
        return _modern(path, _object(path), manifest)
    if manifest is not None:
        raise ConfigError(f"{path} is missing beside {MANIFEST}; export or download the model again")
    path = directory / CONFIG
    if path.is_file() and LEGACY_KEY in (config := _object(path)):
        neuron = config[LEGACY_KEY]
        if not isinstance(neuron, dict):
            raise ConfigError(f'{path}: "{LEGACY_KEY}" is {neuron!r}, not an object; export the model again')
        return _legacy(path, neuron)
    return None


def read_manifest(model_dir: str | Path) -> Manifest | None:
    try:
        return Manifest.read(model_dir)
    except LoadError as error:
        raise ConfigError(str(error)) from None


def _modern(path: Path, values: Mapping[str, Any], manifest: Manifest | None) -> ExportSettings:
    if "sequence_length" not in values and "batch_size" not in values:
        raise ConfigError(
            f"{path} has neither batch_size nor sequence_length, so it is no optimum-neuron configuration; "
            "move it away to serve the directory as a checkpoint"
        )
    cast = "torch_dtype" if values.get("auto_cast_type") is None else "auto_cast_type"
    return ExportSettings(
        form="neuron_config.json" if manifest is None else "neuronserve",
        batch_size=_count(path, values, "max_batch_size", "batch_size", default=1),
        sequence_length=_count(path, values, "sequence_length", default=128),
        num_cores=_count(path, values, "tp_degree", "num_cores", default=1),
        auto_cast_type=_cast(path, values, cast),
        quantization=None if manifest is None else manifest.quantization,
        checkpoint_id=_text(path, values, "checkpoint_id"),
        checkpoint_revision=_text(path, values, "checkpoint_revision"),
        compiler_version=_text(path, values, "neuronxcc_version") if manifest is None else None,  # we used none
        library_version=_text(path, values, "optimum_neuron_version") if manifest is None else manifest.version,
        quantize_head=manifest is not None and manifest.quantize_head,
    )


def _legacy(path: Path, values: Mapping[str, Any]) -> ExportSettings:
    return ExportSettings(
        form="config.json",
        batch_size=_count(path, values, "batch_size"),
        sequence_length=_count(path, values, "sequence_length"),
        num_cores=_count(path, values, "num_cores"),
        auto_cast_type=_cast(path, values, "auto_cast_type"),
        quantization=None,
        checkpoint_id=_text(path, values, "checkpoint_id"),
        checkpoint_revision=_text(path, values, "checkpoint_revision"),
        compiler_version=_text(path, values, "compiler_version"),
        library_version=_text(path, values, "optimum_neuron_version", "optimum_version"),
    )


def _object(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not readable JSON ({error}); export or download the model again") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, not an object; export or download the model again")
    return found


def _count(path: Path, values: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    key = next((key for key in keys if values.get(key) is not None), keys[-1])
    value = values.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{path}: {key} is {value!r}, not a whole number of at least 1; export the model again")
    return value


def _cast(path: Path, values: Mapping[str, Any], key: str) -> str | None:
    text = _text(path, values, key)
    if text is None:
        return None
    if text.lower() not in CAST_TYPES:
        raise ConfigError(f"{path}: {key} is {text!r}; known are {', '.join(CAST_TYPES)}")
    return CAST_TYPES[text.lower()]


def _text(path: Path, values: Mapping[str, Any], *keys: str) -> str | None:
    key = next((key for key in keys if values.get(key) is not None), keys[-1])
    value = values.get(key)
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{path}: {key} is {value!r}, not a text; export the model again")
    return value
