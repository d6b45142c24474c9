"""A key, and the files of its artifact. Importable by processes that a test starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neuronserve.server.cache.key import ArtifactKey

FILES = {"library/a.neff": b"first graph", "library/b.neff": b"second graph" * 1000, "library/empty": b""}
ABOUT = {"model": "org/tiny"}

FIELDS: dict[str, Any] = {
    "backend": "transformers-neuronx",
    "model": {"model_type": "llama", "hidden_size": 64, "rope_scaling": {"factor": 8.0}},
    "shapes": ("decode 4, context 128", "prefill 64, context 64"),
    "max_num_seqs": 4,
    "max_model_len": 128,
    "block_size": 128,
    "dtype": "bfloat16",
    "quantization": None,
    "quantize_head": False,
    "sampling": "host",
    "tensor_parallel_size": 2,
    "neuron_config": {"fuse_qkv": True},
    "compiler": "neuronx-cc 2.20",
    "compiler_flags": ("-O1",),
    "libraries": {"transformers-neuronx": "0.13.1216"},
}


def key(**changes: Any) -> ArtifactKey:
    return ArtifactKey(**{**FIELDS, **changes})


def write_files(directory: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def read_files(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }
