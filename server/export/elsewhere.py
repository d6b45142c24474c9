"""An export for a chip, made where there is none: a build host that runs the chip's own image.

The chip's rules hold for it; settings and checkpoint are written, as on the chip's machine, and nothing is compiled.
"""

from __future__ import annotations

from collections.abc import Mapping

from neuronserve.neuron_worker import machine, options
from neuronserve.neuron_worker.environment import Environment
from neuronserve.neuron_worker.picking import FAMILIES

INSTANCES = tuple(dict.fromkeys(family for families in FAMILIES.values() for family in families))


def options_of(instance: str | None, environ: Mapping[str, str]) -> dict[str, object]:
    """Options that resolve for a chip elsewhere; none where the device of this machine is meant."""
    values, _ = options.read({}, environ)
    if not values["require_chip"] or machine.has_device():
        return {}
    backend = values["backend"]
    if backend == "auto":
        backend = Environment.read(environ).framework or _drives(instance)
    return {"backend": backend, "require_chip": False} if backend in FAMILIES else {}


def _drives(instance: str | None) -> str:
    """The first backend, of a family where one is named."""
    return next(backend for backend, families in FAMILIES.items() if instance is None or instance in families)
