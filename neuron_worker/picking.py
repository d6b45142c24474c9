"""Which device serves here, and whether a chip has room for what was asked. Decides from facts; probes nothing.

    pick(asked, machine) ──▶ Pick(backend, why)          or a ConfigError: the reason `neuronserve doctor` gives too
    check_room(config, memory, machine)                  refuses cores and bytes that are not there, before any compile

With Neuron devices the answer is the chip's backend or an error, never the processor in silence; without them it is
`cpu`, and one line says so. Imports neither vLLM nor torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neuronserve.bucketing.memory import MemoryFacts, memory
from neuronserve.bucketing.report import remedy

from . import environment
from .config import NeuronConfig
from .device import registry
from .device.errors import DeviceError
from .errors import ConfigError
from .instances import install_line
from .machine import CORES_PER_DEVICE, PLACEHOLDER, Interpreter, Machine
from .values import near

NEEDS: Mapping[str, tuple[str, ...]] = {
    "transformers-neuronx": ("transformers-neuronx", "torch-neuronx", "neuronx-cc"),
    "torch-neuronx": ("torch-neuronx", "neuronx-cc"),
}
"""Backend of a chip -> packages it cannot work without. The first that can be used is picked."""

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "transformers-neuronx": ("inf2", "trn1", "trn1n"),
    "torch-neuronx": ("inf2", "trn1", "trn1n", "trn2", "trn3"),
}
"""Backend -> instance families that its library drives."""

TWO_CORES = ("inf2", "trn1", "trn1n")
"""Families of whose devices the number of cores is known."""

OLDEST_PYTHON = (3, 10)
DOCTOR = "`neuronserve doctor` shows what was found"
NO_CHIP = (
    "require_chip: no Neuron device on this machine (no /dev/neuron*): start the container with --device /dev/neuron0 "
    "(one for each chip) on an Inf2 or Trn1 instance that has the driver, or unset NEURONSERVE_REQUIRE_CHIP"
)


@dataclass(frozen=True)
class Asked:
    """Filled by `resolve` from options and environment."""

    backend: str = "auto"
    framework: str | None = None  # the backend that VLLM_NEURON_FRAMEWORK means
    device_flag: bool = False  # --device neuron
    require_chip: bool = False


@dataclass(frozen=True)
class Pick:
    backend: str
    why: str
    notes: tuple[str, ...] = ()


def pick(asked: Asked, machine: Machine) -> Pick:
    if asked.backend != "auto":
        return _by_name(asked, machine)
    if machine.devices:
        return _chip(asked, machine)
    if asked.require_chip:
        raise ConfigError(NO_CHIP)
    notes = (f"{environment.FRAMEWORK_KEY} is ignored: no Neuron device on this machine",) if asked.framework else ()
    flag = "--device neuron: " if asked.device_flag else ""
    return Pick("cpu", f"{flag}no Neuron device on this machine; the cpu device computes the same graphs", notes)


def _by_name(asked: Asked, machine: Machine) -> Pick:
    try:
        backend = registry.choose(asked.backend)
        on_chip = registry.capabilities(backend).on_chip
    except DeviceError as error:
        raise ConfigError(f"{error}{near(asked.backend, ('auto', *registry.names()))}") from None
    if on_chip:
        return _chip_by_name(backend, asked, machine)
    if asked.require_chip:
        raise ConfigError(f"backend={backend}: that is no chip, and require_chip is set; leave one of them out")
    here = "this machine's Neuron device is not used" if machine.devices else "no Neuron device on this machine"
    flag = "--device neuron: " if asked.device_flag else ""
    return Pick(backend, f"{flag}asked for by name, {here}; it computes the same graphs")


def _chip_by_name(backend: str, asked: Asked, machine: Machine) -> Pick:
    """Whether its SDK is there, the SDK itself will say."""
    if not machine.devices:
        if asked.require_chip:
            raise ConfigError(NO_CHIP)
        missing = f"no Neuron device on this machine (no /dev/neuron*): the {backend} device will look for one"
        return Pick(backend, "asked for by name", (missing,))
    if problem := driver_problem(machine):
        raise ConfigError(problem)
    return Pick(backend, "asked for by name")


def _chip(asked: Asked, machine: Machine) -> Pick:
    if problem := driver_problem(machine):
        raise ConfigError(problem)
    first = [asked.framework] if asked.framework else []
    problems: list[str] = []
    for backend in dict.fromkeys((*first, *NEEDS)):
        problem = backend_problem(backend, machine)
        if problem is None:
            where = machine.sdk.path if machine.sdk else ""
            skipped = tuple(f"{environment.FRAMEWORK_KEY} is not followed: {why}" for why in problems if first)
            return Pick(backend, f"{', '.join(machine.devices)} and the SDK of {where}", skipped)
        problems.append(problem)
    raise ConfigError(
        f"{machine.devices[0]} is here, and nothing that can drive it: {'; '.join(dict.fromkeys(problems))}. {DOCTOR}; "
        "--neuronserve.backend cpu serves on the processor"
    )


def driver_problem(machine: Machine) -> str | None:
    """Why the devices cannot be opened, or None."""
    if machine.driver_missing:
        return (
            f"{machine.devices[0]} is here, but the Neuron driver is not loaded: install aws-neuronx-dkms on the host "
            f"(sudo modprobe neuron); {DOCTOR}"
        )
    if machine.closed_devices:
        return (
            f"{', '.join(machine.closed_devices)}: this user may not open it; run as a user of its group, in a "
            f"container pass it with --device; {DOCTOR}"
        )
    return None


def backend_problem(backend: str, machine: Machine) -> str | None:
    """Why this chip's backend cannot serve here, or None."""
    family, python = machine.family, machine.sdk
    if family is not None and family not in FAMILIES[backend]:
        return f"the {backend} backend drives {' and '.join(FAMILIES[backend])}, this is {machine.instance}"
    if python is None or python.problem:
        where = python.path if python else "device_python"
        return f"{where} {python.problem if python else 'was not asked'}"
    if missing := _missing(NEEDS[backend], python):
        return f"{python.path} has no {' and no '.join(missing)} ({_install(backend)})"
    if _release(python.version) < OLDEST_PYTHON:
        return f"{python.path} is Python {python.version}, the device needs 3.10 or newer"
    if backend not in registry.names():
        return f"the {backend} backend is not in this version of neuronserve"
    return None


def _missing(names: tuple[str, ...], python: Interpreter) -> list[str]:
    empty = f" (the {PLACEHOLDER} there is the public index's placeholder, which holds no code)"
    return [f"{name}{empty if name in python.placeholders else ''}" for name in names if not python.has(name)]


def _install(backend: str) -> str:
    return f"{install_line(backend)}, or name the SDK's Python in NEURONSERVE_DEVICE_PYTHON"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def check_room(config: NeuronConfig, facts: MemoryFacts, machine: Machine) -> None:
    """Refuse cores and bytes a chip has not. The embedded devices need neither."""
    if not config.capabilities.on_chip:
        return
    _check_cores(config, machine)
    batch, length = config.max_num_seqs, config.max_model_len
    use = memory(facts, batch, length)
    if not use.fits:
        raise ConfigError(
            f"--max-num-seqs {batch} at --max-model-len {length} needs {use.total / 2**30:.1f} GiB on each of "
            f"{facts.cores} cores, a core has {use.limit / 2**30:.0f}: {remedy(facts, batch, length)}"
        )


def _check_cores(config: NeuronConfig, machine: Machine) -> None:
    wanted, visible = config.tensor_parallel_size, machine.visible_cores
    named, total = machine.named_cores, len(machine.devices) * CORES_PER_DEVICE
    if machine.family not in (None, *TWO_CORES) and named is not None:
        visible = named  # how many there are is not known: the runtime will say
    if machine.devices and named is not None and named > (visible or 0):
        raise ConfigError(
            f"{machine.visible_by}: {named} cores are named, {visible} of them are there; name cores of 0-{total - 1}, "
            "those of another server left out"
        )
    if visible is None or wanted <= visible:
        return
    fewer = max((n for n in config.capabilities.tensor_parallel_degrees or (visible,) if n <= visible), default=0)
    remedies = [f"--tensor-parallel-size {fewer}"] if fewer else []
    if wanted > len(machine.devices) * CORES_PER_DEVICE:
        flags = [f"--device /dev/neuron{number}" for number in range(-(-wanted // CORES_PER_DEVICE))]
        remedies.insert(0, f"start the container with {' '.join(flags)}")
    else:
        remedies.insert(0, f"make {wanted} cores visible")
    raise ConfigError(
        f"--tensor-parallel-size {wanted} needs {wanted} cores, {visible} are visible ({machine.visible_by}): "
        f"{', or '.join(remedies)}"
    )
