"""What a device's process starts, tells and is told: nothing of it stays, and nobody but the server ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from neuronserve.neuron_worker.device import leash, remote
from neuronserve.neuron_worker.device.errors import DeviceError, DeviceLost
from neuronserve.neuron_worker.device.remote import Deadlines, RemoteDevice

from .test_remote import OPTIONS, SERVER, World, group_of, is_running, serve, wait_until, world

__all__ = ["world"]


def daemon_of(world: World, device: RemoteDevice) -> int:
    """A process in a session of its own, which holds the log open, as a compiler's server may be."""
    world.fault("load", "start a daemon")
    device.load(str(world.directory), OPTIONS)
    daemon = int((world.directory / "compiler").read_text())
    assert os.getpgid(daemon) != os.getpgid(device.pid)
    return daemon


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_a_daemon_that_a_backend_started_ends_with_the_device(world: World, end: str) -> None:
    device = world.start()
    daemon, threads = daemon_of(world, device), threading.active_count()
    if end == "killed":
        os.kill(device.pid, signal.SIGKILL)
    device.close()
    assert not Path(f"/proc/{daemon}").exists()  # reaped, too
    assert group_of(device.pid) == []
    assert threading.active_count() == threads - 1  # of its output


def test_a_daemon_ends_with_the_server_too(world: World) -> None:
    world.fault("load", "start a daemon")
    script = f"{SERVER}\nprint('loaded', flush=True)\nsys.stdin.read()"
    command = [sys.executable, "-c", script, str(world.python), str(world.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert [server.stdout.readline() for _ in range(2)][1] == "loaded\n"
        daemon = int((world.directory / "compiler").read_text())
        server.kill()
    assert wait_until(lambda: not is_running(daemon))


def test_others_are_not_taken_for_a_devices(world: World) -> None:
    """Only the whole mark counts, and none is the mark of all."""
    other = subprocess.Popen(["sleep", "600"], env={**os.environ, leash.MARK: "someone else's"})
    try:
        world.start().close()
        leash.end_what_is_left("")
        leash.end_what_is_left("someone")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_service_manager_s_word_to_all_processes_leaves_the_device_to_the_server(world: World) -> None:
    device = world.ready()
    expected = serve(device)
    os.killpg(os.getpgid(device.pid), signal.SIGTERM)
    time.sleep(0.3)
    assert device.is_alive
    assert serve(device) == expected
    pid = device.pid
    os.kill(pid, signal.SIGKILL)
    assert wait_until(
        lambda: not [each for each in group_of(pid) if is_running(each)]
    )  # its keeper still does its work


@pytest.mark.parametrize("verb", ["load", "run"])
def test_a_backend_that_calls_exit_is_one_error(world: World, verb: str) -> None:
    device = world.ready() if verb == "run" else world.start()
    world.fault(verb, "leave")
    with pytest.raises(DeviceError, match="SystemExit: no license found") as raised:
        serve(device) if verb == "run" else device.load(str(world.directory), OPTIONS)
    assert not isinstance(raised.value, DeviceLost)
    assert device.is_alive


def test_time_in_which_nobody_ran_is_nobodys_silence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that is frozen with both processes in it, for longer than a step or a silence may last."""
    device = world.ready(Deadlines(run=60, silence=60))
    expected = serve(device)
    world.fault("run", "dawdle")
    real, ticks = time.monotonic, 0

    def jumping() -> float:
        nonlocal ticks
        ticks += 1
        return real() + (3600 if ticks > 1 else 0)  # after the wait's first look

    monkeypatch.setattr(remote.time, "monotonic", jumping)
    assert serve(device) == expected
