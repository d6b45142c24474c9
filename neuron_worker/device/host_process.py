"""Another interpreter running this folder: started, its output passed on, its end told in words.

A thread of its own starts the process, reads its output until it ends and reaps it. The thread matters: the kernel
kills the process when the thread that started it ends, so that must not be one of the caller's.

Knows no protocol beyond the two file descriptors the process is given.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import threading
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from . import leash
from .errors import DeviceError

logger = logging.getLogger(__name__)

_FOLDER = Path(__file__).resolve().parent
_LAST_LINES = 12
_NOT_INHERITED = ("PYTHONHOME", "PYTHONPATH", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__")
"""They describe this process's environment; another interpreter would find the wrong packages by them."""


class HostProcess:
    """Running from construction on, or `DeviceError`."""

    def __init__(self, device_python: str, arguments: Sequence[str], descriptors: Sequence[int]) -> None:
        self.python = find_python(device_python)
        self._command = [self.python, str(_FOLDER), *arguments]
        self._descriptors = tuple(descriptors)
        self._owner = os.getpid()
        self._mark = uuid.uuid4().hex
        self._failure: OSError | None = None
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True, name="device-process")
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise DeviceError(f"device_python={device_python!r} cannot be started: {self._failure}")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def end(self, patience: float = 0.0) -> None:
        """Gone when this returns: by itself within `patience` seconds, else killed. May be called twice."""
        if os.getpid() != self._owner:
            return  # a fork of the owner, on its own way out
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        leash.end_what_is_left(self._mark)  # it could hold the end of the output, too
        self._thread.join(timeout=5)

    def obituary(self) -> str:
        """How it ended, and its last words. After `end`."""
        code = self._process.returncode
        if code is None:
            how = "it runs on"
        elif code < 0:
            how = f"it was ended by {signal.Signals(-code).name}"
        else:
            how = f"it exited with status {code}"
        words = "\n  ".join(self._last_lines)
        return f"{how}; its last output:\n  {words}" if words else how

    def _live(self) -> None:
        leash.adopt_orphans()
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                pass_fds=self._descriptors,
                env={**environment(self.python, os.environ), leash.MARK: self._mark},
                start_new_session=True,  # the terminal's Ctrl-C is for the server, which then closes the device
            )
        except OSError as error:
            self._failure = error
            return
        finally:
            self._started.set()
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                self._pass_on(line.rstrip())
        self._process.wait()
        leash.reap_group(self._process.pid)

    def _pass_on(self, line: str) -> None:
        if line:
            self._last_lines.append(line)
            logger.info("[device %d] %s", self._process.pid, line)


def find_python(device_python: str) -> str:
    found = shutil.which(os.path.expanduser(device_python))
    if found is None:
        raise DeviceError(
            f"device_python={device_python!r} is not an executable file; "
            "give the interpreter of the SDK's environment, as /opt/.../bin/python"
        )
    # Not resolved further: the environment is known by the path of its link.
    return os.path.abspath(found)


def environment(python: str, ours: Mapping[str, str]) -> dict[str, str]:
    """What the process sees: our variables without those of our own environment, the tools beside its Python first."""
    kept = {name: value for name, value in ours.items() if name not in _NOT_INHERITED}
    # An SDK calls its compiler by name, as it may where its environment is activated.
    path = os.pathsep.join((os.path.dirname(python), kept.get("PATH", os.defpath)))
    return {**kept, "PATH": path, "PYTHONUNBUFFERED": "1"}
