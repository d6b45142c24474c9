"""`neuronserve doctor`: what was found on this machine, which device would serve and why, what to install.

    examine(given, environ) ──▶ Diagnosis(text, is_well)

Judges with `picking`, so its reason is the one the server would exit with. Imports neither vLLM nor torch nor an SDK.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from neuronserve.server.cache.places import Places, places

from . import environment, instances, options
from .device import registry
from .errors import ConfigError
from .machine import PACKAGES, Ask, Interpreter, Machine, ask_interpreter, look
from .picking import backend_problem
from .resolve import picked

SERVER_PACKAGES = ("neuronserve", "vllm", "torch", "transformers", "numpy")
CACHE_KEY = "NEURON_COMPILE_CACHE_URL"
DEFAULT_CACHE = "/var/tmp/neuron-compile-cache"
"""The compiler's own."""
_INDENT = 22


@dataclass(frozen=True)
class Diagnosis:
    text: str
    is_well: bool  # a server would start here with these options


def examine(
    given: Mapping[str, object], environ: Mapping[str, str], root: Path = Path("/"), ask: Ask = ask_interpreter
) -> Diagnosis:
    """`given`: our options, as on the command line."""
    values, warnings = options.read(given, environ)
    device_python = None if values["device_python"] is None else str(values["device_python"])
    sdk = ask(device_python)
    problem: str | None = None
    device, notes, machine = "", tuple(warnings), Machine()
    try:
        machine = look(environ, device_python, root, lambda _: sdk)
        choice = picked(values, environment.Environment.read(environ), machine)
        device, notes = f"{choice.backend}: {choice.why}", (*notes, *choice.notes)
        if device_python is not None and sdk.problem is not None:
            problem = sdk.refusal
        elif registry.capabilities(choice.backend).on_chip:
            problem = backend_problem(choice.backend, replace(machine, sdk=sdk))  # one asked for by name was not judged
    except ConfigError as error:
        problem = str(error)
        machine = machine if machine.devices else look({}, device_python, root, lambda _: sdk)
    sections = [
        ("machine", _machine(replace(machine, sdk=sdk))),
        ("server", [("python", platform.python_version()), *((name, _version(name)) for name in SERVER_PACKAGES)]),
        ("device side", _interpreter(sdk, device_python)),
        ("files", _files(values, environ)),
    ]
    lines = [line for title, rows in sections for line in _section(title, rows)]
    lines += [
        "would serve with",
        f"  {f'nothing: {problem}' if problem else device}",
        *(f"  note: {note}" for note in notes),
    ]
    lines += ["", "what to install", *(f"  {line}".rstrip() for line in instances.lines(registry.names()))]
    return Diagnosis("\n".join(lines), problem is None)


def _section(title: str, rows: list[tuple[str, str]]) -> list[str]:
    return [title, *(f"  {name:{_INDENT}}{value}".rstrip() for name, value in rows), ""]


def _machine(machine: Machine) -> list[tuple[str, str]]:
    driver = machine.driver or "loaded, version unknown"
    if machine.driver is None:
        driver = "not loaded" if machine.driver_missing else "cannot be seen from here"
    cores = "none" if machine.visible_cores is None else f"{machine.visible_cores} ({machine.visible_by})"
    devices = ", ".join(f"{d} (closed to this user)" if d in machine.closed_devices else d for d in machine.devices)
    return [
        ("instance", machine.instance or "unknown"),
        ("Neuron devices", devices or "none (no /dev/neuron*)"),
        ("Neuron driver", driver),
        ("visible cores", cores),
    ]


def _interpreter(sdk: Interpreter, device_python: str | None) -> list[tuple[str, str]]:
    where = sdk.path if device_python else f"{sdk.path} (the server's own; NEURONSERVE_DEVICE_PYTHON names another)"
    if sdk.problem:
        return [("python", f"{where}: {sdk.problem}")]
    placeholder = " (a placeholder of the public index: no code in it)"
    return [
        ("python", f"{sdk.version} {where}"),
        *(
            (name, sdk.packages.get(name, "not installed") + (placeholder if name in sdk.placeholders else ""))
            for name in PACKAGES
        ),
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _files(values: Mapping[str, object], environ: Mapping[str, str]) -> list[tuple[str, str]]:
    given = {name: None if values[name] is None else str(values[name]) for name in ("artifacts", "cache_url")}
    try:
        where = places(environ, given["artifacts"], given["cache_url"])
    except ConfigError as error:
        return [("artifacts", str(error))]
    shared = f"{where.remote} ({where.remote_from})" if where.remote else "none"
    own = _cache(environ, where.compiler_cache or DEFAULT_CACHE)
    return [("artifacts", _mirror(where)), ("shared artifacts", shared), ("compile cache", own)]


def _mirror(where: Places) -> str:
    if where.local is None:
        return where.note or "not kept (--neuronserve.artifacts DIRECTORY keeps compiled graphs between starts)"
    return _folder(where.local, count=lambda folder: folder.glob("v1/manifests/*.json"))


def _folder(folder: Path, count: Callable[[Path], Iterable[Path]] = Path.iterdir) -> str:
    if not folder.exists():
        return f"{folder} (not there yet)"
    if not folder.is_dir():
        return f"{folder} (a file: give a directory)"
    state = f"{sum(1 for _ in count(folder))} entries"
    return f"{folder} ({state}{'' if os.access(folder, os.W_OK) else ', not writable by this user'})"


def _cache(environ: Mapping[str, str], default: str) -> str:
    """Of the chip's compiler: its flag, its variable, its default here."""
    flag = re.search(r"--cache_dir[= ](\S+)", environ.get("NEURON_CC_FLAGS", ""))
    place = flag[1] if flag else environ.get(CACHE_KEY, "").strip() or default
    return f"{place} (remote)" if "://" in place else _folder(Path(place))
