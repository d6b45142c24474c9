"""`pytorch_model.bin`, in which published EAGLE heads come, read by torch's own reader of tensors alone.

Answers as `safetensors.SafetensorsFile` does. Where there is no torch, or one whose reader could be made to run code,
the file is refused with how to convert it. Knows no model and no tensor names.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import LoadError
from .ops import FloatType
from .safetensors import TensorEntry

_SAFE_SINCE = (2, 6)
_TYPES: dict[str, FloatType] = {
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
}


class TorchFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._tensors: dict[str, Any] = _read(path)

    def close(self) -> None:
        self._tensors = {}

    @property
    def names(self) -> list[str]:
        return list(self._tensors)

    def entry(self, name: str) -> TensorEntry:
        tensor = self._tensors[name]
        stored = str(tensor.dtype)
        if stored not in _TYPES:
            raise LoadError(f"{name} in {self.path} has type {stored}; supported are {', '.join(_TYPES)}")
        return TensorEntry(name, _TYPES[stored], tuple(tensor.shape), 0)

    def read(self, entry: TensorEntry, first: int, count: int) -> NDArray[np.float32]:
        """`count` elements from the `first` on, as a new float32 array."""
        values: NDArray[np.float32] = self._tensors[entry.name].flatten()[first : first + count].float().numpy()
        return np.array(values, dtype=np.float32)

    def mapped(self, entry: TensorEntry) -> NDArray[Any] | None:
        return None

    def integers(self, name: str, size: int) -> NDArray[np.int64]:
        values: NDArray[np.int64] = self._tensors[name].numpy()
        if values.dtype != np.int64 or values.shape != (size,):
            raise LoadError(f"{name} in {self.path} is {values.dtype} {list(values.shape)}; it must be int64 [{size}]")
        return values


def _read(path: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise LoadError(f"{path} needs torch to be read, which is not installed here; {_remedy(path)}") from None
    version = str(torch.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < _SAFE_SINCE:
        raise LoadError(f"{path} could run code when torch {version} reads it; {_remedy(path)}")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of its zip reader, its unpickler and the system
        raise LoadError(f"{path} is not readable ({str(error).splitlines()[0]}); {_remedy(path)}") from error
    if not isinstance(tensors, dict) or not all(isinstance(each, torch.Tensor) for each in tensors.values()):
        raise LoadError(f"{path} holds more than tensors by name; {_remedy(path)}")
    return tensors


def _remedy(path: Path) -> str:
    return (
        f"convert it once with safetensors.torch.save_file(torch.load({path.name!r}, weights_only=True), "
        "'model.safetensors') under torch 2.6 or newer"
    )
