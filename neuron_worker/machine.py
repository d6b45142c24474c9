"""What this machine has: Neuron devices, their driver, the cores this process may use, the SDK in an interpreter.

    look(environ, device_python) ──▶ Machine      facts alone: what follows from them is `picking`'s

Nothing of an SDK is imported: packages are found by their metadata, in another interpreter by asking it. Imports
neither vLLM nor torch, and reads nothing but a few files below `root`.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .device.environment import COUNT_KEY, VISIBLE_KEY, cores
from .device.errors import DeviceError
from .device.host_process import find_python
from .errors import ConfigError

CORES_PER_DEVICE = 2
"""Of Inf2 and Trn1; more cannot be told without the SDK, and our backends serve no other chip with several cores."""

SDK_PACKAGES = ("transformers-neuronx", "torch-neuronx", "neuronx-cc", "libneuronxla")
PACKAGES = (*SDK_PACKAGES, "torch", "numpy")
PLACEHOLDER = "1.0"
"""The version of the empty packages that hold the SDK's names on the public index."""

_DRIVER = "sys/module/neuron"
_PRODUCT = "sys/devices/virtual/dmi/id/product_name"
_MARK = "neuronserve's answer:"
"""An interpreter's own start may print, too."""

_PATIENCE = 300  # seconds; a slow disk, and nothing of it in memory
_ASK = f"""
import importlib.metadata as m, json, sys
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
found = {{name: version(name) for name in {PACKAGES!r}}}
print({_MARK!r}, json.dumps([sys.version.split()[0], {{name: v for name, v in found.items() if v}}]))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python and what of `PACKAGES` is installed there. Filled by `ask`."""

    path: str
    version: str = ""
    packages: Mapping[str, str] = field(default_factory=dict)  # name -> version
    problem: str | None = None  # why it could not be asked

    @property
    def placeholders(self) -> tuple[str, ...]:
        """Packages that hold a name of the SDK and nothing else."""
        named = ("torch-neuronx", "neuronx-cc")
        return tuple(name for name in named if re.fullmatch(r"1\.0(\.0)*", self.packages.get(name, "")))

    @property
    def refusal(self) -> str:
        """Of a `device_python` with a problem, with the remedy."""
        return f"device_python={self.path!r} {self.problem}; name a Python interpreter, or leave it out"

    def has(self, *names: str) -> bool:
        return all(name in self.packages and name not in self.placeholders for name in names)


@dataclass(frozen=True)
class Machine:
    """Filled by `look`."""

    devices: tuple[str, ...] = ()  # /dev/neuron0, ...
    closed_devices: tuple[str, ...] = ()  # those of them that this user may not open
    driver: str | None = None  # version of the kernel module; "" where it does not say
    driver_missing: bool = False  # the kernel's modules can be seen, and it is not among them
    instance: str | None = None  # "inf2.xlarge", where the machine says so
    visible_cores: int | None = None  # that this process may use; None: nothing limits or tells it
    visible_by: str = ""  # what says so, for messages
    named_cores: int | None = None  # that the runtime's variables name, there or not; None: they name none
    sdk: Interpreter | None = None  # where the device would run; not asked without devices

    @property
    def family(self) -> str | None:
        """inf2, trn1, ..., where the instance is one with Neuron chips."""
        name = (self.instance or "").partition(".")[0]
        return name if re.fullmatch(r"(inf|trn)\d[a-z]*", name) else None


Ask = Callable[[str | None], Interpreter]


def has_device(root: Path = Path("/")) -> bool:
    """Whether the Neuron driver shows a device on this machine."""
    return bool(_devices(root))


def look(
    environ: Mapping[str, str], device_python: str | None = None, root: Path = Path("/"), ask: Ask | None = None
) -> Machine:
    """The facts. `device_python`: the interpreter the device would run in; None: this one."""
    devices = _devices(root)
    visible, named, by = _visible_cores(devices, environ)
    return Machine(
        devices=tuple(f"/dev/{path.name}" for path in devices),
        closed_devices=tuple(f"/dev/{path.name}" for path in devices if not os.access(path, os.R_OK | os.W_OK)),
        driver=_driver(root),
        driver_missing=_lists_modules(root) and not (root / _DRIVER).exists(),
        instance=_read(root / _PRODUCT),
        visible_cores=visible,
        visible_by=by,
        named_cores=named,
        sdk=(ask or ask_interpreter)(device_python) if devices else None,
    )


def ask_interpreter(device_python: str | None) -> Interpreter:
    """The interpreter's version and packages, by their metadata."""
    if device_python is None:
        found = {name: version for name in PACKAGES if (version := _version(name))}
        return Interpreter(sys.executable, sys.version.split()[0], found)
    try:
        command = [find_python(device_python), "-I", "-c", _ASK]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=False)
    except (DeviceError, OSError, subprocess.TimeoutExpired) as error:
        return Interpreter(device_python, problem=f"cannot be started ({error})")
    if done.returncode:
        said = " ".join(done.stderr.split()[-12:])
        return Interpreter(device_python, problem=f"ended with status {done.returncode}: {said}")
    try:
        version, packages = json.loads(done.stdout.rpartition(_MARK)[2])
    except ValueError:
        return Interpreter(device_python, problem=f"is no Python: it answered {done.stdout[-80:]!r}")
    return Interpreter(device_python, version, packages)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices(root: Path) -> list[Path]:
    found = [path for path in (root / "dev").glob("neuron[0-9]*") if path.name[6:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[6:]))


def _driver(root: Path) -> str | None:
    return (_read(root / _DRIVER / "version") or "") if (root / _DRIVER).is_dir() else None


def _lists_modules(root: Path) -> bool:
    folder = root / "sys" / "module"
    return folder.is_dir() and any(folder.iterdir())


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip() or None
    except OSError:
        return None


def _visible_cores(devices: list[Path], environ: Mapping[str, str]) -> tuple[int | None, int | None, str]:
    """(how many, named, what says so): the devices, and what the runtime's variables leave of them."""
    total = len(devices) * CORES_PER_DEVICE if devices else None
    by = f"{_count(len(devices), 'device')} of {CORES_PER_DEVICE} cores" if devices else ""
    listed, count = (environ.get(key, "").strip() for key in (VISIBLE_KEY, COUNT_KEY))
    if not listed and not count:
        return total, None, by
    key, value = (VISIBLE_KEY, listed) if listed else (COUNT_KEY, count)
    try:
        numbers = cores(value) if listed else range(_whole(count))
    except DeviceError as error:
        raise ConfigError(str(error)) from None
    left = len(numbers) if total is None else sum(number < total for number in numbers)
    return left, len(numbers), f"{key}={value}{f' on {by}' if by else ''}"


def _whole(text: str) -> int:
    if not text.isdigit() or text == "0":
        raise ConfigError(f"{COUNT_KEY}={text!r}: expected a number of cores, such as 2")
    return int(text)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"
