"""What every image runs: choose the user, then become the server. Standard library alone.

    entrypoint.py tgi        ARGUMENTS…   text-generation-launcher ARGUMENTS…
    entrypoint.py sagemaker  ARGUMENTS…   text-generation-launcher serve ARGUMENTS…, on SageMaker's port; so do
                                          `entrypoint.py tgi serve` and `entrypoint.py vllm serve`, with no word after
                                          it, which is how that platform runs an image
    entrypoint.py vllm       ARGUMENTS…   vllm serve ARGUMENTS…

Containers start as root, because the documented `docker run` lines need what only root has on some hosts: a port below
1024 with --net=host, a root-owned directory mounted as /data, device files of root. Where an ordinary user can bind
the port, write the data and open the devices, root is dropped; where not, one line says which of them keeps it.
"""

from __future__ import annotations

import glob
import os
import pwd
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

USER = "neuronserve"
PORT_FILE = Path("/tmp/neuronserve.port")
"""Where the health check finds the port."""

SAGEMAKER_PORT = 8080
SAGEMAKER_PREFIX = "SM_ON_"
DATA_VARIABLES = ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "NEURONSERVE_ARTIFACTS")
"""Directories that the server writes to."""


@dataclass(frozen=True)
class Role:
    """A server of the image: the words before the container's own arguments, and where it listens by default."""

    command: tuple[str, ...]
    port_flags: tuple[str, ...]
    port: int
    port_variables: tuple[str, ...] = ()  # the first that is set


LAUNCHER = "text-generation-launcher"
ROLES = {
    "tgi": Role((LAUNCHER,), ("--port", "-p"), 3000, ("SAGEMAKER_BIND_TO_PORT", "PORT", "SM_ON_PORT")),
    "sagemaker": Role((LAUNCHER, "serve"), ("--port", "-p"), SAGEMAKER_PORT, ("SAGEMAKER_BIND_TO_PORT", "SM_ON_PORT")),
    "vllm": Role(("vllm", "serve"), ("--port",), 8000),
}


def role_of(words: Sequence[str]) -> str:
    """SageMaker runs whichever image it is given with the word `serve`, and asks at its own port.

    `vllm serve MODEL` is a command, `vllm serve` is not: of the server's image the word alone is SageMaker's too.
    """
    return "sagemaker" if list(words[:2]) == ["tgi", "serve"] or list(words) == ["vllm", "serve"] else words[0]


def command_line(role: str, arguments: Sequence[str]) -> list[str]:
    """The server's own command line. `serve`, and `vllm serve`, may be given or left out."""
    given = list(arguments)
    if role == "vllm" and given[:1] == ["vllm"]:
        given = given[1:]
    if given[:1] == ["serve"]:
        given = given[1:]
    return [*ROLES[role].command, *given]


def listening_port(role: str, command: Sequence[str], environ: Mapping[str, str]) -> int:
    """As the server reads it: the last --port of the command, else a variable of the role, else the role's own."""
    flags, variables = ROLES[role].port_flags, ROLES[role].port_variables
    found = next((environ[name].strip() for name in variables if environ.get(name, "").strip()), "")
    for word, following in zip(command, [*command[1:], ""], strict=True):
        value = flag_value(word, following, flags)
        found = found if value is None else value
    return int(found) if found.isdigit() else ROLES[role].port


def flag_value(word: str, following: str, flags: Sequence[str]) -> str | None:
    """Of `--port 80`, `--port=80`, `-p 80`, `-p80`; None: the word is none of the flags."""
    name, equals, rest = word.partition("=")
    if name in flags:
        return rest if equals else following
    short = [flag for flag in flags if not flag.startswith("--") and word.startswith(flag)]
    return word.removeprefix(short[0]) if short else None


def data_directories(environ: Mapping[str, str]) -> list[Path]:
    return [Path(environ[name]) for name in DATA_VARIABLES if environ.get(name)]


def obstacles(port: int, directories: Sequence[Path], devices: Sequence[str]) -> list[str]:
    """What the process that asks may not do of what serving needs; empty: nothing stands in the way."""
    found = []
    try:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except PermissionError:
        found.append(f"port {port}")
    except OSError:
        pass  # taken: the server itself says so
    found += [f"write {directory}" for directory in directories if not _writable(directory)]
    found += [f"open {device}" for device in devices if not os.access(device, os.R_OK | os.W_OK)]
    return found


def _writable(directory: Path) -> bool:
    """Whether files can be made in it, or in the nearest directory that is there; and what lies in it kept up."""
    if directory.is_dir():
        entries = [directory, *directory.iterdir()] if os.access(directory, os.R_OK | os.X_OK) else [directory]
        return all(os.access(entry, os.W_OK) for entry in entries)
    return directory.parent != directory and _writable_above(directory.parent)


def _writable_above(directory: Path) -> bool:
    return os.access(directory, os.W_OK | os.X_OK) if directory.exists() else _writable_above(directory.parent)


def become(user: pwd.struct_passwd, devices: Sequence[str]) -> None:
    """The user, for good, in the groups that own the devices."""
    groups = {os.stat(device).st_gid for device in devices if os.path.exists(device)} - {0}
    os.setgroups(sorted(groups | {user.pw_gid}))
    os.setgid(user.pw_gid)
    os.setuid(user.pw_uid)


def obstacles_as(user: pwd.struct_passwd, port: int, directories: Sequence[Path], devices: Sequence[str]) -> list[str]:
    """`obstacles`, asked as that user in a process of its own: dropping root cannot be taken back."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        status = 1
        try:
            become(user, devices)
            os.write(writing, "\n".join(obstacles(port, directories, devices)).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as answer:
        lines = answer.read().splitlines()
    _, status = os.waitpid(child, 0)
    return lines if status == 0 else [*lines, f"become {user.pw_name}"]


def drop_root(port: int, environ: Mapping[str, str]) -> Mapping[str, str]:
    """The environment to serve in; from here on as an ordinary user where that can serve."""
    if os.geteuid() != 0:
        return environ
    try:
        user = pwd.getpwnam(USER)
    except KeyError:
        return environ
    devices = sorted(glob.glob("/dev/neuron*"))
    if found := obstacles_as(user, port, data_directories(environ), devices):
        say(f"serving as root: user {USER} may not {', '.join(found)}")
        return environ
    become(user, devices)
    say(f"serving as user {USER}")
    return {**environ, "HOME": user.pw_dir, "USER": USER}


def note_port(port: int) -> None:
    """Serving does not need it."""
    try:
        PORT_FILE.write_text(f"{port}\n")
        PORT_FILE.chmod(0o644)
    except OSError as error:
        remedy = f"run the container with --tmpfs {PORT_FILE.parent}"
        say(f"the health check cannot find port {port}: {PORT_FILE}: {error.strerror}; {remedy}")


def say(line: str) -> None:
    print(f"entrypoint: {line}", file=sys.stderr, flush=True)


def remarks(given: str, role: str, environ: Mapping[str, str]) -> list[str]:
    """What is not obvious of the role, for the image of that name."""
    if given == "vllm" and role == "sagemaker":
        return [f"`serve` alone is SageMaker's: {LAUNCHER} serves, and reads its variables"]
    unread = sorted(name for name in environ if name.startswith(SAGEMAKER_PREFIX))
    if role == "vllm" and unread:
        return [f"{', '.join(unread)}: no effect on `vllm serve`; give its flags, or the word `serve` alone"]
    return []


def main(words: Sequence[str]) -> None:
    if not words or words[0] not in ROLES:
        raise SystemExit(f"entrypoint: the first argument is one of {', '.join(ROLES)}; given: {' '.join(words[:1])!r}")
    role = role_of(words)
    for line in remarks(words[0], role, os.environ):
        say(line)
    command = command_line(role, words[1:])
    port = listening_port(role, command, os.environ)
    note_port(port)
    environ = drop_root(port, os.environ)
    os.execvpe(command[0], command, dict(environ))


if __name__ == "__main__":
    main(sys.argv[1:])
