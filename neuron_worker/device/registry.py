"""Backends by name. Asking for one imports it; listing them imports nothing.

`capabilities(name)` is what planning needs, `refuse_model(name, ...)`, `refuse_settings(name, ...)` and
`refuse_draft(name, ...)` what it must not promise; none of them ever imports torch or an SDK. `create(name)` makes the
device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from .base import Capabilities, Device, DeviceOptions
from .errors import DeviceError


class UnknownBackend(DeviceError, ValueError):
    """No such backend, or not on this machine; the message lists what is supported."""


@dataclass(frozen=True)
class _Backend:
    module: str  # relative to this package; imported on first use
    capabilities: str  # name of a `Capabilities` in it
    factory: str  # name of a callable in it: Capabilities -> Device
    settings: str | None = None  # module whose `refuse` knows the NeuronConfig fields that the backend does not serve
    models: str | None = None  # module whose `refuse` knows the models that it does not serve
    drafts: str | None = None  # module whose `refuse` knows the drafts that it does not serve


_BACKENDS = {
    "cpu": _Backend(".cpu.device", "CAPABILITIES", "create"),
    "cpu-torch": _Backend(".graph.torch_device", "CAPABILITIES", "TorchDevice"),
    "arithmetic": _Backend(".arithmetic", "CAPABILITIES", "ArithmeticDevice"),
    "arithmetic-slots": _Backend(".arithmetic", "SLOT_CAPABILITIES", "ArithmeticDevice"),
    "transformers-neuronx": _Backend(
        ".transformers_neuronx.capabilities",
        "CAPABILITIES",
        "create",
        ".transformers_neuronx.settings",
        ".transformers_neuronx.checkpoint",
        ".transformers_neuronx.draft_pair",
    ),
    "torch-neuronx": _Backend(".torch_neuronx.capabilities", "CAPABILITIES", "create", ".torch_neuronx.settings"),
}

DEFAULT = "cpu"


def names() -> tuple[str, ...]:
    """Every backend that can be asked for."""
    return tuple(_BACKENDS)


def choose(requested: str = "auto") -> str:
    """The backend's name for what the user asked: "auto" is the best this machine has."""
    if requested == "auto":
        return DEFAULT
    _backend(requested)
    return requested


def capabilities(name: str) -> Capabilities:
    backend = _backend(name)
    found: Capabilities = getattr(_import(name, backend), backend.capabilities)
    return found


def refuse_settings(name: str, given: Mapping[str, Any], max_num_seqs: int) -> None:
    """`LoadError`, as `load` would raise it, for fields of NeuronConfig that the backend does not serve."""
    backend = _backend(name)
    if backend.settings is not None:
        refuse: Callable[[Mapping[str, Any], int], None] = import_module(backend.settings, __package__).refuse
        refuse(given, max_num_seqs)


def refuse_model(name: str, model_dir: str, options: DeviceOptions) -> None:
    """`DeviceError`, as `load` would raise it, for a model that the backend does not serve. Reads config.json alone."""
    backend = _backend(name)
    if backend.models is not None:
        refuse: Callable[[str, DeviceOptions], None] = import_module(backend.models, __package__).refuse
        refuse(model_dir, options)


def refuse_draft(name: str, model_dir: str, draft_dir: str, options: DeviceOptions) -> None:
    """`DeviceError`, as `load` would raise it, for a draft that the backend does not serve beside this model."""
    backend = _backend(name)
    if backend.drafts is not None:
        refuse: Callable[[str, str, DeviceOptions], None] = import_module(backend.drafts, __package__).refuse
        refuse(model_dir, draft_dir, options)


def create(
    name: str,
    device_python: str | None = None,
    step_seconds: float | None = None,
    prepare_seconds: float | None = None,
) -> Device:
    """A device that holds nothing yet: `load` comes next.

    With `device_python` it lives in that interpreter, where a step may take `step_seconds`, and loading and compiling
    `prepare_seconds`; None: the defaults.
    """
    backend = _backend(name)
    if device_python is not None:
        from .remote import Deadlines, RemoteDevice

        return RemoteDevice(name, device_python, Deadlines.asked(step_seconds, prepare_seconds))
    module = _import(name, backend)
    device: Device = getattr(module, backend.factory)(getattr(module, backend.capabilities))
    return device


def _backend(name: str) -> _Backend:
    if name in _BACKENDS:
        return _BACKENDS[name]
    supported = ", ".join(("auto", *_BACKENDS))
    raise UnknownBackend(f"backend={name!r} is not known; use one of {supported}")


def _import(name: str, backend: _Backend) -> object:
    try:
        return import_module(backend.module, __package__)
    except ImportError as error:
        raise UnknownBackend(f"backend={name!r} cannot be imported here: {error}") from error
