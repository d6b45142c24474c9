"""Ties a device's process to the one that started it, so that nothing outlives the server.

    the server dies           the kernel kills this process (and the socket closes, where there is no such kernel)
    this process dies         its keeper kills what it started: a compiler runs for an hour and takes all memory
    the device is closed      the same

Whoever is process 1 of a container seldom reaps what it inherits, so the server takes the orphans of a device's
process for its own and reaps them.

The keeper is a fork that sleeps in the same process group until its parent is gone. Imports nothing beyond the
standard library: the fork is made before there are threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def tie_to_parent() -> None:
    """Call first thing, from the main thread, in a process that leads its own group."""
    if sys.platform != "linux":
        return
    if os.getpgrp() == os.getpid():  # never the group of somebody's shell
        _start_keeper()
    _signal_at_parents_death(signal.SIGKILL)


def _start_keeper() -> None:
    parent = os.getpid()
    if os.fork():
        return
    try:
        _keep(parent)
    finally:
        os._exit(1)


def _keep(parent: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    _signal_at_parents_death(signal.SIGTERM)
    # The socket and the log must close with the parent, not with this process.
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd")]:
        with contextlib.suppress(OSError):  # the one that listed them
            os.close(descriptor)
    if os.getppid() == parent:
        signal.sigwait({signal.SIGTERM})
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


def _signal_at_parents_death(number: int) -> None:
    """The kernel's notion of a parent is the thread that forked; `host_process` keeps that thread alive."""
    _prctl(_PR_SET_PDEATHSIG, int(number))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
