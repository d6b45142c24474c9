"""How an export is served: what it was made for fills what was not asked, and what contradicts it is refused.

    keywords of vLLM's engine arguments ── fill ──▶ the same, with batch, length, cores and type of the export
    what is about to be served ── check ──▶ notes, or a `ConfigError` that names both values

A batch or length below the export's is served; above it is refused, as is another number of cores, another type or
other quantisation. Knows no vLLM and no weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from neuronserve.server.cache.places import GRAPHS_OF_EXPORT

from .config import NeuronConfig
from .device.errors import LoadError
from .errors import ConfigError
from .exported import ExportSettings, read_manifest
from .model_files import export_settings

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
LOADABLE = "compiled/*.neff"
COMPILED = ("compiled/*.neff", "*.neff", "model.pt", "model_*.pt")
"""Graphs in exports of optimum-neuron, older and newer."""


def fill(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """What the export was made for, where nothing else was asked."""
    kept, model = dict(keywords), keywords.get("model")
    found = export_settings(model, kept.get("revision"), kept.get("download_dir")) if isinstance(model, str) else None
    if found is None:
        return kept
    _, settings = found
    made_for = {
        "max_num_seqs": (settings.batch_size, (None,)),
        "max_model_len": (settings.sequence_length, (None,)),
        "tensor_parallel_size": (settings.num_cores, (None, 1)),  # 1 is what vLLM writes where nothing was asked
        "dtype": (DTYPES.get(settings.auto_cast_type or ""), (None, "auto")),
    }
    for key, (value, not_asked) in made_for.items():
        if value is not None and kept.get(key) in not_asked:
            kept[key] = value
    return kept


def check(settings: ExportSettings, directory: str, config: NeuronConfig) -> list[str]:
    """Notes; the first contradiction is an error."""
    for problem in _contradictions(settings, directory, config):
        raise ConfigError(problem)
    if settings.is_ours:
        _check_small_files(directory)
    return list(_notes(settings, directory, config))


def quantization(
    settings: ExportSettings | None, directory: str, asked: str | None, explicit: str | None
) -> str | None:
    """What is served: `asked` under the key `explicit` (None: nothing was asked), or what the export was made with."""
    if settings is None or not settings.is_ours or (explicit is not None and asked == settings.quantization):
        return asked
    if explicit is not None:
        raise ConfigError(
            f"{explicit} asks for {asked or 'no'} quantization, and the export in {directory} was made with "
            f"{settings.quantization or 'none'}: leave it out, or export again"
            + (" with --quant s8" if asked == "int8" else " without --quant" if asked is None else "")
        )
    return settings.quantization


def _contradictions(settings: ExportSettings, directory: str, config: NeuronConfig) -> Iterator[str]:
    dtype = DTYPES.get(settings.auto_cast_type or "", config.dtype)
    rules = (
        ("--max-num-seqs", config.max_num_seqs, settings.batch_size, "batch-size", "sequences at a time"),
        ("--max-model-len", config.max_model_len, settings.sequence_length, "sequence-length", "tokens of a sequence"),
    )
    for flag, here, there, name, what in rules:
        if here > there:
            yield _contradiction(flag, here, f"{there} {what}", directory, f"--{name} {here}")
    if config.tensor_parallel_size != settings.num_cores:
        here = config.tensor_parallel_size
        made = f"{settings.num_cores} cores"
        yield _contradiction("--tensor-parallel-size", here, made, directory, f"--num-cores {here}")
    if config.dtype != dtype:
        short = {long: short for short, long in DTYPES.items()}[config.dtype]
        yield _contradiction("--dtype", config.dtype, dtype, directory, f"--auto-cast-type {short}")
    if settings.is_ours and config.quantize_head and not settings.quantize_head:
        yield _contradiction("quantize_head", True, "a head that is not int8", directory, "--quantize-head")


def _contradiction(flag: str, here: object, made_for: str, directory: str, again: str) -> str:
    return f"{flag} {here}: the export in {directory} was made for {made_for}; leave {flag} out, or export with {again}"


def _check_small_files(directory: str) -> None:
    """Of an export of ours: all that is no weight and no graph. Those are looked at when they are loaded."""
    manifest = read_manifest(directory)
    assert manifest is not None
    others = [name for name in manifest.files if not name.endswith(".safetensors")]
    small = [name for name in others if not name.startswith(f"{GRAPHS_OF_EXPORT}/")]
    try:
        manifest.check(directory, [name for name in small if (Path(directory) / name).exists()])
    except LoadError as error:
        raise ConfigError(str(error)) from None


def _notes(settings: ExportSettings, directory: str, config: NeuronConfig) -> Iterator[str]:
    made_by = "neuronserve" if settings.is_ours else "optimum-neuron"
    version = f" {settings.library_version}" if settings.library_version else ""
    quantized = f", {settings.quantization}" if settings.quantization else ""
    yield (
        f"an export by {made_by}{version}: batch {settings.batch_size}, sequence length {settings.sequence_length}, "
        f"{settings.num_cores} cores, {settings.auto_cast_type or 'type not said'}{quantized}"
    )
    compiled = sorted(path for pattern in COMPILED for path in Path(directory).glob(pattern))
    if not settings.is_ours and compiled and not _is_decided_later(config, directory):
        names = f"{compiled[0].relative_to(directory)}" + (f" and {len(compiled) - 1} more" if compiled[1:] else "")
        yield f"compiled files of the export ({names}) are not used: {_why_again(settings, config)}"


def _is_decided_later(config: NeuronConfig, directory: str) -> bool:
    """Where the chip's own library is at hand; see `foreign_graphs`."""
    return config.backend == "transformers-neuronx" and any(Path(directory).glob(LOADABLE))


def _why_again(settings: ExportSettings, config: NeuronConfig) -> str:
    if not config.capabilities.on_chip:
        return f"the {config.backend} device compiles nothing"
    compiler = f"neuronx-cc {settings.compiler_version or 'of a version it does not say'}"
    library = f"optimum-neuron {settings.library_version}" if settings.library_version else "a library it does not name"
    return f"they are for {compiler} and {library}, and {config.backend} makes other graphs; it compiles again"
