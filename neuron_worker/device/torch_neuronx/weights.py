"""A model's tensors as one list, and the model around another list of them.

A compiler moves a module's parameters to the chip; the graph must then find them where they are, not in the model that
was loaded. Knows no SDK.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from torch import Tensor, nn

from ..graph.decoder import Model


class Weights(nn.Module):
    """The tensors as parameters, shared by every graph of the model."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self._model = model
        self.tensors = nn.ParameterList(frozen(tensor) for tensor in _tensors(model))

    def model(self) -> Model:
        """The model on the parameters as they are now."""
        rebuilt: Model = _rebuilt(self._model, iter(list(self.tensors)))
        return rebuilt


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for part in _parts(value).values():
        yield from _tensors(part)


def _rebuilt(value: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(value, Tensor):
        return next(tensors)
    parts = {name: _rebuilt(part, tensors) for name, part in _parts(value).items()}
    if not parts:
        return value
    if isinstance(value, tuple):
        return tuple(parts.values())
    return replace(value, **parts)


def _parts(value: Any) -> dict[Any, Any]:
    """In an order that is always the same."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(enumerate(value)) if isinstance(value, tuple) else {}
