"""The part of an export that knows the device: weights in its own layout, the plan's shapes, and the manifest.

    write_weights(config, source, directory) ── packed/… ──▶ entries
    write_manifest(config, directory, entries)    every file there is, with size and checksum; the last thing written

Knows no vLLM, no hub and no command line.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from .config import NeuronConfig
from .device.errors import DeviceError
from .device.manifest import Manifest, PackedEntry, entry_of
from .errors import ConfigError


def write_weights(config: NeuronConfig, source: str, directory: Path) -> tuple[tuple[PackedEntry, ...], str]:
    """(packed files, a line that says what became of the weights)."""
    if config.backend != "cpu":
        return (), f"the {config.backend} device has no packed layout: its weights are the checkpoint's own"
    from .device.cpu import library, packed

    try:
        session = library.Session(library.num_threads(config.threads), os.environ.get(library.ISA_VARIABLE, ""))
    except library.NativeMissing as missing:
        return (), f"{missing}. The weights are the checkpoint's own, and loading them packs them"
    try:
        entry = packed.write_packed(source, config.device_options(), directory, session)
    except DeviceError as error:
        raise ConfigError(str(error)) from None
    finally:
        session.close()
    return (entry,), f"weights packed for {entry.key['isa']} kernels: {_size(directory / entry.file)}"


def write_manifest(config: NeuronConfig, directory: Path, packed: Sequence[PackedEntry]) -> None:
    paths = sorted(path for path in directory.rglob("*") if path.is_file())
    Manifest(
        version=package_version(),
        backend=config.backend,
        quantization=config.quantization,
        quantize_head=config.quantize_head,
        files={path.relative_to(directory).as_posix(): entry_of(path) for path in paths},
        packed=packed,
        shapes=[asdict(shape) for shape in config.plan.shapes],
    ).write(directory)


def package_version() -> str:
    try:
        return version("neuronserve")
    except PackageNotFoundError:
        return "0"


def _size(path: Path) -> str:
    return f"{path.stat().st_size / 1e6:.0f} MB"
