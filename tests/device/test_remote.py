"""A device in another process: what its death, silence and noise look like, and that nothing of it is left."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from neuronserve.neuron_worker.device import host_process, registry
from neuronserve.neuron_worker.device.base import DeviceOptions, StepShape
from neuronserve.neuron_worker.device.errors import DeviceError, DeviceLost, UncompiledShape
from neuronserve.neuron_worker.device.host_process import environment, find_python
from neuronserve.neuron_worker.device.remote import Deadlines, RemoteDevice
from neuronserve.neuron_worker.device.wire import PROTOCOL, Verb

from .driver import Driver, Stream, decode, prefill

FAULTY_HOST = Path(__file__).parent / "faulty_host.py"
OPTIONS = DeviceOptions(max_num_seqs=4, max_model_len=64, block_size=8, prompts_per_call=4)
PROMPT = [5, 9, 2, 41, 7]
SHAPES = (StepShape(0, 1, 8, 64), StepShape(2, 1, 0, 64))


class World:
    """A model directory, an interpreter whose device's process fails on demand, and the devices made of them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        (directory / "config.json").write_text(json.dumps({"vocab_size": 103}))
        self.python = directory / "faulty_python"
        self.python.write_text(f'#!/bin/sh\nexec {sys.executable} {FAULTY_HOST} "$@"\n')
        self.python.chmod(0o755)
        self.devices: list[RemoteDevice] = []

    def start(self, deadlines: Deadlines | None = None) -> RemoteDevice:
        self.devices.append(RemoteDevice("arithmetic", str(self.python), deadlines))
        return self.devices[-1]

    def ready(self, deadlines: Deadlines | None = None) -> RemoteDevice:
        device = self.start(deadlines)
        for verb in verbs(device, self.directory):
            verb()
        return device

    def prepare_and_serve(self, device: RemoteDevice) -> list[int]:
        for verb in verbs(device, self.directory):
            verb()
        return serve(device)

    def go_on(self, device: RemoteDevice, verb: str) -> None:
        """From the verb that failed; everything is prepared if that was a step."""
        order = ["load", "allocate", "compile", "compile", "seal", "run"]
        for call in verbs(device, self.directory)[order.index(verb) :]:
            call()

    def fault(self, verb: str, what: str) -> None:
        (self.directory / "faults.json").write_text(json.dumps({verb: what}))


def verbs(device: RemoteDevice, directory: Path) -> list[Callable[[], object]]:
    return [
        lambda: device.load(str(directory), OPTIONS),
        lambda: device.allocate(9),
        *(lambda shape=shape: device.compile(shape) for shape in SHAPES),
        device.seal,
    ]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    for device in world.devices:
        device.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """What a device serves that nothing has happened to."""
    world = World(tmp_path_factory.mktemp("world"))
    device = world.ready()
    tokens = serve(device)
    device.close()
    return tokens


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the device's process said, at its own logger: where that one's lines go is the server's affair."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger, level = host_process.logger, host_process.logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.setLevel(level)
    logger.removeHandler(handler)


def serve(device: RemoteDevice, num_tokens: int = 4) -> list[int]:
    """A prompt and its greedy tokens, on a device that is loaded, allocated and sealed."""
    driver = _driver(device)
    stream = Stream(list(PROMPT), blocks=[1, 2])
    rows = [prefill(stream, len(PROMPT))]
    for _ in range(num_tokens):
        [result] = driver.step(rows, SHAPES[rows[0].is_decode])
        assert result.logits is not None
        stream.tokens.append(int(result.logits[-1].argmax()))
        rows = [decode(stream)]
    return stream.tokens


class _Ready(Driver):
    def __init__(self, device: RemoteDevice) -> None:
        self.device = device
        self.block_size, self.max_model_len, self.prompts_per_call, self.num_drafts = 8, 64, 4, 0
        self._compiled = set(SHAPES)

    def give_blocks(self, stream: Stream, length: int) -> None:
        pass


def _driver(device: RemoteDevice) -> Driver:
    return _Ready(device)


def is_running(pid: int) -> bool:
    """A process that ended but was not yet reaped by its parent does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def held() -> tuple[int, int]:
    """Descriptors and threads of this process."""
    gc.collect()  # what the tests before left
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def wait_until(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    give_up = time.monotonic() + seconds
    while not condition() and time.monotonic() < give_up:
        time.sleep(0.02)
    return condition()


# -- every fault in every phase

VERBS = ("load", "allocate", "compile", "seal", "run")


class Short(Deadlines):
    """For verbs of a process that is up; a busy machine may take longer to bring an interpreter up."""

    def silence_of(self, verb: Verb) -> float:
        return Deadlines().long_silence if verb is Verb.HELLO else super().silence_of(verb)


@dataclass(frozen=True)
class Ending:
    """A fault that ends the process."""

    fault: str
    deadlines: Deadlines
    reason: str  # what the caller is told, a regular expression with a place for the verb


ENDINGS = (
    Ending("die", Deadlines(), r"ended during {}; it was ended by SIGKILL; .*\n  about to die"),
    Ending(
        "hang", Short(load=1, compile=1, run=1), "hung during {}: no answer within 1 s; device_{}timeout allows it m"
    ),
    Ending("stop", Short(silence=1.5, long_silence=1.5), r"hung during {}: no sign of life for 1\.5 s"),
    Ending("babble", Deadlines(), "answered {} with garbage: a message began with b'loading the compiler"),
)
in_every_way = pytest.mark.parametrize("ending", ENDINGS, ids=lambda ending: ending.fault)
while_it_prepares = pytest.mark.parametrize("verb", ["load", "compile", "seal"])


def struck(world: World, ending: Ending, device: RemoteDevice, verb: str, call: Callable[[], object]) -> None:
    """`call` meets the fault at `verb`, and finds the device lost; nobody is left of its process."""
    world.fault(verb, ending.fault)
    device.deadlines = ending.deadlines
    reason = ending.reason.format(verb, "" if verb == "run" else "prepare_")
    with pytest.raises(DeviceLost, match=rf"the device's process \d+ \(.*\) {reason}"):
        call()
    assert not is_running(device.pid)
    assert wait_until(lambda: group_of(device.pid) == [])
    with pytest.raises(DeviceLost, match=reason):
        device.seal()
    device.deadlines = Deadlines()


@in_every_way
@pytest.mark.parametrize("verb", VERBS)
def test_a_fault_of_a_new_device_loses_it_and_a_restart_goes_on_from_there(
    world: World, verb: str, ending: Ending, expected: list[int]
) -> None:
    before = held()
    device = world.start()
    struck(world, ending, device, verb, lambda: world.prepare_and_serve(device))
    device.restart()  # does what had succeeded
    world.go_on(device, verb)
    assert serve(device) == expected
    device.close()
    assert held() == before


@in_every_way
@while_it_prepares
def test_a_restart_that_meets_a_fault_can_be_tried_again(
    world: World, verb: str, ending: Ending, expected: list[int]
) -> None:
    device = world.ready()
    before = held()
    struck(world, ending, device, verb, device.restart)
    device.restart()
    assert serve(device) == expected
    assert held() == before
    with pytest.raises(UncompiledShape):
        device.compile(StepShape(3, 1, 0, 64))  # sealed, as it was


def broken(call: Callable[[], object]) -> None:
    """One error, and no loss."""
    with pytest.raises(DeviceError, match="the backend failed: RuntimeError: a register fell off") as raised:
        call()
    assert not isinstance(raised.value, DeviceLost)


@pytest.mark.parametrize("verb", VERBS)
def test_a_backends_defect_is_one_verbs_error_and_the_process_serves_on(
    world: World, verb: str, expected: list[int], logged: list[str]
) -> None:
    before = held()
    device = world.start()
    pid = device.pid
    world.fault(verb, "break")
    broken(lambda: world.prepare_and_serve(device))
    assert device.is_alive
    world.go_on(device, verb)
    assert serve(device) == expected
    assert device.pid == pid
    assert wait_until(lambda: any("Traceback" in line for line in logged))
    device.close()
    assert held() == before


@while_it_prepares
def test_a_restart_that_meets_a_backends_defect_can_be_tried_again(
    world: World, verb: str, expected: list[int]
) -> None:
    device = world.ready()
    before = held()
    world.fault(verb, "break")
    broken(device.restart)
    assert device.is_alive
    half_way = device.pid
    device.restart()
    assert not is_running(half_way)
    assert serve(device) == expected
    assert held() == before


# -- a process that dies


def test_killed_from_outside_in_the_middle_of_a_step(world: World) -> None:
    device = world.ready()
    expected = serve(device)
    world.fault("run", "hang")

    def kill_once_it_hangs() -> None:
        wait_until((world.directory / "hanging").exists)
        os.kill(device.pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_once_it_hangs)
    killer.start()
    with pytest.raises(DeviceLost, match="ended during run"):
        serve(device)
    killer.join()
    device.restart()
    assert serve(device) == expected


def test_killed_while_idle_is_found_at_the_next_step(world: World) -> None:
    device = world.ready()
    os.kill(device.pid, signal.SIGKILL)
    assert wait_until(lambda: not device.is_alive)
    with pytest.raises(DeviceLost, match="ended during run"):
        serve(device)


def test_killed_while_idle_is_found_by_looking(world: World) -> None:
    device = world.ready()
    device.check()
    os.kill(device.pid, signal.SIGKILL)
    assert wait_until(lambda: not device.is_alive)  # a moment after its end, once it is reaped
    with pytest.raises(DeviceLost, match=r"ended while idle; it was ended by SIGKILL"):
        device.check()
    device.restart()
    device.check()
    assert serve(device) == serve(device)


def test_stopped_while_idle_is_found_by_looking(world: World) -> None:
    device = world.ready(Deadlines(silence=1.0))
    os.kill(device.pid, signal.SIGSTOP)

    def found() -> bool:
        with contextlib.suppress(DeviceLost):
            device.check()
            return False
        return True

    assert wait_until(found)
    with pytest.raises(DeviceLost, match=r"hung while idle: no sign of life for 1 s"):
        device.check()


def test_a_pause_of_the_server_is_no_silence_of_the_device(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    device = world.ready()
    device.check()
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 3600)
    device._beats = device._beats.copy()  # the other process is thawed a moment later
    device.check()
    device.check()


def test_a_lost_device_stays_lost_until_it_is_restarted(world: World) -> None:
    device = world.ready()
    world.fault("run", "die")
    for _ in range(2):
        with pytest.raises(DeviceLost, match="ended during run"):
            serve(device)
    with pytest.raises(DeviceLost, match="ended during run"):
        device.copy_blocks([(1, 2)])
    assert not device.is_alive
    device.restart()
    assert device.is_alive


# -- a process that hangs


@pytest.mark.parametrize("verb", ["compile", "seal"])
def test_a_long_compilation_with_signs_of_life_is_waited_for(world: World, verb: str) -> None:
    """A chip's backend compiles at either verb."""
    device = world.start()
    device.deadlines = replace(device.deadlines, silence=2.5, other=2.5)
    world.fault(verb, "dawdle")  # longer than the silence, and than a verb that only tidies up may take
    assert world.prepare_and_serve(device)[: len(PROMPT)] == PROMPT


@pytest.mark.parametrize("verb", ["load", "seal"])
def test_an_sdk_that_keeps_pythons_lock_while_it_prepares_is_waited_for(world: World, verb: str) -> None:
    device = world.start(Deadlines(silence=2.5))
    world.fault(verb, "keep the lock")
    assert world.prepare_and_serve(device)[: len(PROMPT)] == PROMPT


def test_a_step_that_keeps_pythons_lock_is_not(world: World) -> None:
    device = world.ready(Deadlines(silence=2.5))
    world.fault("run", "keep the lock")
    with pytest.raises(DeviceLost, match=r"hung during run: no sign of life for 2\.5 s"):
        serve(device)


def test_steps_may_be_silent_for_as_long_as_they_may_take() -> None:
    assert Deadlines.asked(600, None).silence_of(Verb.RUN) == 600
    assert Deadlines.asked(3, None).silence_of(Verb.RUN) == Deadlines().silence
    assert Deadlines.asked(7200, None).silence_of(Verb.SEAL) == 7200


PREPARING = (Verb.LOAD, Verb.ALLOCATE, Verb.COMPILE, Verb.SEAL)


def test_hours_of_loading_and_compiling_are_waited_for_and_any_number_that_is_asked_for() -> None:
    for verb in PREPARING:
        assert Deadlines().of(verb) == Deadlines.asked(3, None).of(verb) == 24 * 3600
        assert Deadlines.asked(None, 300_000).of(verb) == 300_000
    assert Deadlines.asked(None, 5).of(Verb.RUN) == Deadlines().of(Verb.RUN)


def test_a_backend_is_given_the_time_that_the_server_is_asked_for(world: World) -> None:
    device = registry.create("arithmetic", str(world.python), 3, 5)
    assert isinstance(device, RemoteDevice)
    world.devices.append(device)
    assert [device.deadlines.of(verb) for verb in (Verb.RUN, Verb.SEAL)] == [3, 5]


def test_a_compiler_that_hangs_in_a_process_that_gives_signs_of_life_is_ended(world: World) -> None:
    device = world.start(Deadlines.asked(None, 2))
    world.fault("seal", "hang")
    with pytest.raises(DeviceLost, match=r"hung during seal: no answer within 2 s; device_prepare_timeout allows it m"):
        world.prepare_and_serve(device)
    assert not is_running(device.pid)


# -- a process that talks nonsense


def test_a_second_reply_is_noise(world: World) -> None:
    device = world.ready()
    world.fault("run", "answer twice")
    with pytest.raises(DeviceLost, match="answered run with garbage"):
        serve(device)
    assert not is_running(device.pid)


def test_another_protocol_is_refused_by_both_numbers(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAULTY_PROTOCOL", "99")
    with pytest.raises(DeviceError, match=f"the server speaks protocol {PROTOCOL}, the device's process 99"):
        world.start()


def test_an_option_that_cannot_cross_is_refused_and_the_device_serves_on(world: World) -> None:
    device = world.start()
    with pytest.raises(DeviceError, match="not plain data"):
        device.load(str(world.directory), replace(OPTIONS, neuron_config={"path": Path("x")}))
    assert world.prepare_and_serve(device)[: len(PROMPT)] == PROMPT


# -- interpreters


def test_an_interpreter_that_is_none_is_named() -> None:
    with pytest.raises(DeviceError, match=r"device_python='/no/such/python' is not an executable file"):
        RemoteDevice("arithmetic", "/no/such/python")


def test_an_interpreter_that_ends_at_once_leaves_its_last_words(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no module named numpy\nexit 3\n")
    python.chmod(0o755)
    with pytest.raises(DeviceLost, match=r"ended during hello; it exited with status 3; .*\n  no module named numpy"):
        RemoteDevice("arithmetic", str(python))


def test_a_backend_the_other_side_does_not_know_is_refused() -> None:
    with pytest.raises(DeviceError, match="'abacus' is not known; use one of"):
        RemoteDevice("abacus", sys.executable)


def test_the_registry_makes_remote_devices() -> None:
    device = registry.create("arithmetic", sys.executable)
    assert isinstance(device, RemoteDevice)
    assert device.capabilities == registry.capabilities("arithmetic")
    assert device.pid != os.getpid()
    device.close()


def test_the_environment_is_the_other_interpreters() -> None:
    ours = {"PATH": "/usr/bin", "PYTHONPATH": "/ours", "VIRTUAL_ENV": "/ours", "NEURON_RT_NUM_CORES": "2"}
    assert environment("/opt/sdk/bin/python", ours) == {
        "PATH": "/opt/sdk/bin:/usr/bin",
        "NEURON_RT_NUM_CORES": "2",
        "PYTHONUNBUFFERED": "1",
    }


def test_an_environments_python_is_not_resolved_to_the_one_it_links_to(tmp_path: Path) -> None:
    (tmp_path / "python").symlink_to(sys.executable)
    assert find_python(str(tmp_path / "python")) == str(tmp_path / "python")


def test_output_reaches_the_log_with_a_prefix(world: World, logged: list[str]) -> None:
    device = world.ready()
    world.fault("run", "mumble")
    serve(device)
    assert wait_until(lambda: f"[device {device.pid}] about to mumble" in logged)


# -- nothing is left


def test_close_leaves_no_process_no_thread_and_no_descriptor(world: World) -> None:
    before = held()
    device = world.ready()
    serve(device)
    device.restart()
    device.close()
    device.close()
    assert not is_running(device.pid)
    assert held() == before
    with pytest.raises(DeviceError, match="closed"):
        device.seal()


def test_an_output_outlives_the_device(world: World) -> None:
    device = world.ready()
    driver, stream = _driver(device), Stream(list(PROMPT), blocks=[1, 2])
    output = device.run(driver.pack([prefill(stream, len(PROMPT))], SHAPES[0]))
    assert output.logits is not None
    before = output.logits.copy()
    device.close()
    del device
    gc.collect()
    np.testing.assert_array_equal(output.logits, before)


def test_a_forgotten_device_ends_with_its_last_reference() -> None:
    device = RemoteDevice("arithmetic", sys.executable)
    pid = device.pid
    del device
    gc.collect()
    assert not is_running(pid)


def test_what_a_backend_started_ends_with_its_process(world: World) -> None:
    device = world.start()
    world.fault("load", "start a compiler")
    device.load(str(world.directory), OPTIONS)
    compiler = int((world.directory / "compiler").read_text())
    assert is_running(compiler)
    os.kill(device.pid, signal.SIGKILL)
    assert wait_until(lambda: not is_running(compiler))


def test_no_entry_stays_in_the_process_table(world: World) -> None:
    """Neither the process, nor its keeper, nor a compiler: a server that restarts its device runs for months."""
    device = world.start()
    world.fault("load", "start a compiler")
    device.load(str(world.directory), OPTIONS)
    pid = device.pid
    assert len(group_of(pid)) == 3
    os.kill(pid, signal.SIGKILL)
    device.close()
    assert group_of(pid) == []


def group_of(leader: int) -> list[int]:
    """Processes of a group, those that ended and were not reaped among them."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[2]) == leader:
                found.append(int(entry.name))
    return sorted(found)


SERVER = """
import json, os, sys, threading
from pathlib import Path
from neuronserve.neuron_worker.device.base import DeviceOptions
from neuronserve.neuron_worker.device.remote import RemoteDevice
python, directory = sys.argv[1:]
device = RemoteDevice("arithmetic", python)
print(device.pid, flush=True)
device.load(directory, DeviceOptions(4, 64, 8, 4))
"""


def test_a_server_killed_while_its_device_is_busy_leaves_nothing(world: World) -> None:
    world.fault("load", "hang")
    command = [sys.executable, "-c", SERVER, str(world.python), str(world.directory)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        pid = int(server.stdout.readline())
        assert wait_until((world.directory / "hanging").exists)
        assert is_running(pid)
        server.kill()
    assert wait_until(lambda: not is_running(pid))


def test_a_device_made_in_a_thread_outlives_the_thread(world: World) -> None:
    thread = threading.Thread(target=world.ready)
    thread.start()
    thread.join()
    [device] = world.devices
    assert serve(device)[: len(PROMPT)] == PROMPT
