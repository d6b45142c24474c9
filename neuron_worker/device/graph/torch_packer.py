"""Checkpoint tensors into torch tensors, a few megabytes at a time.

Knows no architecture: `decoder.py` says what to pack.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .ops import FloatType, LinearWeight, Matrix, NormWeight
from .quantize import quantize_rows

_TORCH_TYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class PackedMatrix:
    values: Tensor  # [out, in]
    scales: Tensor | None = None  # float32 [out], where values are int8
    rounds_input: bool = False  # to int8 too; see `quantize.py`


class TorchPacker:
    """Weights as plain tensors, in rows as the checkpoint has them; a gate's and an up's rows follow each other."""

    def __init__(self, dtype: FloatType, activations: str = "float32") -> None:
        self._name = dtype
        self._rounds_input = activations == "int8"
        self._dtype = _TORCH_TYPES[dtype]
        self.num_bytes = 0  # of all that was packed

    def linear(
        self,
        parts: Sequence[Matrix],
        bias: NDArray[np.float32] | None = None,
        *,
        quantize: bool = False,
        gate: bool = False,
    ) -> LinearWeight:
        rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
        values = torch.empty(rows, columns, dtype=torch.int8 if quantize else self._dtype)
        scales = torch.empty(rows) if quantize else None
        start = 0
        for part in parts:
            end = start + part.shape[0]
            self._fill(part, values[start:end], None if scales is None else scales[start:end])
            start = end
        self._count(values, scales)
        packed = PackedMatrix(values, scales, quantize and self._rounds_input)
        return LinearWeight(columns, rows, packed, None if bias is None else self._vector(bias))

    def norm(
        self,
        kind: Literal["rms", "layer"],
        epsilon: float,
        weight: NDArray[np.float32],
        bias: NDArray[np.float32] | None = None,
    ) -> NormWeight:
        return NormWeight(kind, epsilon, self._vector(weight), None if bias is None else self._vector(bias))

    def table(self, matrix: Matrix) -> Tensor:
        mapped = matrix.mapped() if matrix.dtype == self._name else None
        if mapped is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch has no read-only tensors; nothing writes to this one
                values = torch.from_numpy(mapped)
            values = values.view(torch.bfloat16) if matrix.dtype == "bfloat16" else values
        else:
            values = torch.empty(matrix.shape, dtype=self._dtype)
            self._fill(matrix, values, None)
        self._count(values)
        return values

    def rope_table(self, table: NDArray[np.float32]) -> Tensor:
        return self._vector(table)

    def _fill(self, matrix: Matrix, values: Tensor, scales: Tensor | None) -> None:
        rows, columns = matrix.shape
        step = max(1, _PIECE_BYTES // (4 * columns))
        for start in range(0, rows, step):
            piece = matrix.read(start, start + step)
            if scales is None:
                values[start : start + step] = torch.from_numpy(piece)
                continue
            rounded, piece_scales = quantize_rows(piece)
            values[start : start + step] = torch.from_numpy(rounded)
            scales[start : start + step] = torch.from_numpy(piece_scales)

    def _vector(self, values: NDArray[np.float32]) -> Tensor:
        tensor = torch.from_numpy(values)
        self._count(tensor)
        return tensor

    def _count(self, *tensors: Tensor | None) -> None:
        self.num_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
