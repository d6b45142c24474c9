"""The remedy for a model that one backend of a chip refuses: the other one, where that serves this very request.

Whether it does is found by asking it. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from .config import ServeRequest
from .device import registry
from .errors import ConfigError
from .machine import Machine
from .picking import NEEDS, backend_problem, check_room

if TYPE_CHECKING:
    from .resolve import Resolution


class NotServed(ConfigError):
    """A model, by the backend that was picked; raised by `resolve`."""

    def __init__(self, backend: str, message: str) -> None:
        super().__init__(message)
        self.backend = backend


def remedy(
    refused: NotServed, request: ServeRequest, machine: Machine, resolve: Callable[[ServeRequest], Resolution]
) -> str:
    """What to add to the refusal."""
    if not registry.capabilities(refused.backend).on_chip:
        return ""
    for backend in NEEDS:
        if backend == refused.backend or (machine.devices and backend_problem(backend, machine)):
            continue
        for cores in dict.fromkeys((request.tensor_parallel_size, 1)):
            other = replace(request, tensor_parallel_size=cores, options={**request.options, "backend": backend})
            if _serves(other, machine, resolve):
                fewer = "" if cores == request.tensor_parallel_size else f" --tensor-parallel-size {cores}"
                return f"; --neuronserve.backend {backend}{fewer} serves it"
    return ""


def _serves(request: ServeRequest, machine: Machine, resolve: Callable[[ServeRequest], Resolution]) -> bool:
    try:
        resolution = resolve(request)
        check_room(resolution.config, resolution.memory_facts, machine)
    except ConfigError:
        return False
    return True
