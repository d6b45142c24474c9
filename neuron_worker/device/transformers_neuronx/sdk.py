"""The one place where the library is imported: its classes by name, and the versions a compiled graph depends on.

Knows no model and no options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

from ..errors import LoadError

LIBRARY = "transformers_neuronx"
OLDEST = (0, 13)
"""Before it, a prompt was sampled with the first slot's parameters."""

_DISTRIBUTIONS = ("transformers-neuronx", "torch-neuronx", "neuronx-cc", "libneuronxla", "torch")
REMEDY = (
    "install transformers-neuronx of Neuron SDK 2.25 in the Python that runs the device (device_python), "
    "or choose another backend"
)


@dataclass(frozen=True)
class Sdk:
    """Made by `load`."""

    versions: Mapping[str, str]

    def model_class(self, family: str, name: str) -> Any:
        """`name` of the module of its family, such as llama."""
        return self._find(f"{LIBRARY}.{family}.model", name)

    def config_class(self, name: str) -> Any:
        return self._find(f"{LIBRARY}.config", name)

    def fused_decoder(self) -> Any:
        return self._find(f"{LIBRARY}.fused_speculation", "FusedSpeculativeDecoder")

    @staticmethod
    def _find(module: str, name: str) -> Any:
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise LoadError(f"{module}.{name} cannot be imported ({error}); {REMEDY}") from error


def load() -> Sdk:
    try:
        library = import_module(LIBRARY)
    except Exception as error:  # its dependencies fail in many ways when their versions do not fit
        raise LoadError(f"{LIBRARY} cannot be imported ({type(error).__name__}: {error}); {REMEDY}") from error
    version = str(getattr(library, "__version__", "unknown"))
    _check(version)
    return Sdk({**{name: _installed(name) for name in _DISTRIBUTIONS}, LIBRARY: version})


def _check(version: str) -> None:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise LoadError(f"{LIBRARY} has no version ({version}), as placeholder packages have none; {REMEDY}")
    if (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise LoadError(f"{LIBRARY} {version} is older than {OLDEST[0]}.{OLDEST[1]}; {REMEDY}")


def _installed(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "unknown"
