"""Ties a device's process to the one that started it, so that nothing outlives the server.

    the server dies           the kernel kills this process (and the socket closes, where there is no such kernel)
    this process dies         its keeper kills what it started: a compiler runs for an hour and takes all memory
    the device is closed      the same

Whoever is process 1 of a container seldom reaps what it inherits, so the server takes the orphans of a device's
process for its own and reaps them.

The keeper is a fork that sleeps in the same process group until its parent is gone. What this process started may have
left the group for a session of its own, but has inherited its environment, and is known by a mark there. Imports
nothing beyond the standard library: the fork is made before there are threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

MARK = "NEURONSERVE_DEVICE_PROCESS"
"""The variable whose value only one device's process and what it started have. Set by `host_process`."""

_PASSES = 100  # a process may start another while it is looked for
_PAUSE = 0.01  # seconds


def tie_to_parent() -> None:
    """Call first thing, from the main thread, in a process that leads its own group."""
    if sys.platform != "linux":
        return
    if os.getpgrp() == os.getpid():  # never the group of somebody's shell
        _start_keeper()
        # A service manager tells every process of a server to stop, and the server still answers what runs. A handler,
        # for what is started here would inherit that a signal is ignored.
        signal.signal(signal.SIGTERM, lambda *_: None)
    _signal_at_parents_death(signal.SIGKILL)


def _start_keeper() -> None:
    parent, server = os.getpid(), os.getppid()
    if os.fork():
        return
    try:
        _keep(parent, server)
    finally:
        os._exit(1)


def _keep(parent: int, server: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _signal_at_parents_death(signal.SIGTERM)
    # The socket and the log must close with the parent, not with this process.
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
        with contextlib.suppress(OSError):  # the one that listed them
            os.close(descriptor)
    while os.getppid() == parent:
        signal.sigwait({signal.SIGTERM})  # of the parent's end, or of a service manager
    _kill([pid for pid in _others() if _is_of_group(pid, os.getpgrp())])
    while left := _marked(os.environ.get(MARK, "")):
        if os.getppid() != server:  # which else ends them itself, for it must reap them
            _kill(left)
        time.sleep(_PAUSE)
    os.killpg(0, signal.SIGKILL)


def adopt_orphans() -> None:
    """Call in the server, before it starts a device's process: what that one leaves becomes this one's child."""
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def reap_group(group: int) -> None:
    """The keeper and what it killed, once the device's process itself is reaped: the process table forgets them."""
    if sys.platform == "linux":
        with contextlib.suppress(ChildProcessError):  # none left
            while True:
                os.waitpid(-group, 0)


def end_what_is_left(mark: str) -> None:
    """Whatever a device's process started, in its group or not, once that one is reaped: ended and reaped."""
    if sys.platform != "linux":
        return
    for _ in range(_PASSES):
        found = _marked(mark)
        _kill(found)
        for pid in found:
            _reap(pid)
        if not found:
            return


def _marked(mark: str) -> list[int]:
    """Processes that were started with the mark, but for this one."""
    entry = f"{MARK}={mark}".encode()
    return [pid for pid in _others() if mark and entry in _environment(pid)]


def _others() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]


def _is_of_group(pid: int, group: int) -> bool:
    try:
        return os.getpgid(pid) == group
    except OSError:  # it ended
        return False


def _environment(pid: int) -> list[bytes]:
    """As it was started with; empty for those of other users, and for those that ended."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(OSError):  # gone meanwhile
            os.kill(pid, signal.SIGKILL)


def _reap(pid: int) -> None:
    """A killed process becomes this one's child as soon as its own parent is gone, if it is not yet."""
    for _ in range(_PASSES):
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
            return
        if not os.path.exists(f"/proc/{pid}"):
            return
        time.sleep(_PAUSE)


def _signal_at_parents_death(number: int) -> None:
    """The kernel's notion of a parent is the thread that forked; `host_process` keeps that thread alive."""
    _prctl(_PR_SET_PDEATHSIG, int(number))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
