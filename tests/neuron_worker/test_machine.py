"""What a machine has, read from machines made of a few files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.machine import Interpreter, Machine, ask_interpreter, has_device, look

from .fake_machine import make_machine

PYTHON = Interpreter("python", "3.10.12", {"torch": "2.7.1"})


def found(root: Path, device_python: str | None = None, **environ: str) -> Machine:
    return look(environ, device_python, root, lambda python: PYTHON)


def test_a_chip_with_driver_and_sdk(tmp_path: Path) -> None:
    machine = found(make_machine(tmp_path, 2, instance="inf2.24xlarge"))

    assert machine.devices == ("/dev/neuron0", "/dev/neuron1")
    assert (machine.driver, machine.driver_missing, machine.closed_devices) == ("2.21", False, ())
    assert (machine.instance, machine.family) == ("inf2.24xlarge", "inf2")
    assert machine.visible_cores == 4
    assert machine.sdk == PYTHON


def test_devices_are_counted_in_their_order_and_nothing_else_is_one(tmp_path: Path) -> None:
    machine = found(make_machine(tmp_path, 12, others=["neuron", "neuron_cc", "neuron1x"]))

    assert machine.devices == tuple(f"/dev/neuron{number}" for number in range(12))


def test_a_machine_without_chips_is_asked_for_no_sdk(tmp_path: Path) -> None:
    def ask(python: str | None) -> Interpreter:
        raise AssertionError("asked")

    machine = look({}, None, make_machine(tmp_path, 0, driver=None, instance="m7i.large"), ask)

    assert machine == Machine(driver_missing=True, instance="m7i.large")
    assert machine.family is None
    assert not has_device(tmp_path)


def test_a_device_file_without_its_driver(tmp_path: Path) -> None:
    machine = found(make_machine(tmp_path, 1, driver=None))
    assert machine.driver_missing
    assert machine.driver is None


def test_where_the_kernels_modules_cannot_be_seen_none_is_missed(tmp_path: Path) -> None:
    root = make_machine(tmp_path, 1, driver=None, modules=())
    assert not found(root).driver_missing


@pytest.mark.parametrize(
    ("environ", "cores", "by"),
    [
        ({}, 4, "2 devices of 2 cores"),
        ({"NEURON_RT_VISIBLE_CORES": "0-1"}, 2, "NEURON_RT_VISIBLE_CORES=0-1 on 2 devices of 2 cores"),
        ({"NEURON_RT_VISIBLE_CORES": "2,3,4-7"}, 2, "NEURON_RT_VISIBLE_CORES=2,3,4-7 on 2 devices of 2 cores"),
        ({"NEURON_RT_NUM_CORES": "3"}, 3, "NEURON_RT_NUM_CORES=3 on 2 devices of 2 cores"),
        ({"NEURON_RT_NUM_CORES": "32"}, 4, "NEURON_RT_NUM_CORES=32 on 2 devices of 2 cores"),
        (
            {"NEURON_RT_NUM_CORES": "4", "NEURON_RT_VISIBLE_CORES": "1"},
            1,
            "NEURON_RT_VISIBLE_CORES=1 on 2 devices of 2 cores",
        ),
    ],
)
def test_the_cores_this_process_may_use(tmp_path: Path, environ: dict[str, str], cores: int, by: str) -> None:
    machine = found(make_machine(tmp_path, 2), **environ)
    assert (machine.visible_cores, machine.visible_by) == (cores, by)


@pytest.mark.parametrize(
    "environ", [{"NEURON_RT_VISIBLE_CORES": "all"}, {"NEURON_RT_NUM_CORES": "two"}, {"NEURON_RT_NUM_CORES": "0"}]
)
def test_cores_that_are_no_numbers_name_their_variable(tmp_path: Path, environ: dict[str, str]) -> None:
    [(key, value)] = environ.items()
    with pytest.raises(ConfigError, match=f"{key}='{value}'"):
        found(make_machine(tmp_path, 1), **environ)


def test_this_interpreter_is_read_without_importing_anything() -> None:
    code = (
        "import sys; from neuronserve.neuron_worker.machine import ask_interpreter\n"
        "found = ask_interpreter(None); assert found.packages['numpy'], found\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_another_interpreter_answers_as_this_one_does() -> None:
    here = ask_interpreter(None)
    assert ask_interpreter(sys.executable) == Interpreter(sys.executable, here.version, here.packages)


def test_an_interpreter_may_be_named_as_in_a_shell_and_print_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    talkative = tmp_path / "python"
    talkative.write_text(f'#!/bin/sh\necho "[1, 2] welcome"\nexec {sys.executable} "$@"\n')
    talkative.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))

    found = ask_interpreter("~/python")

    assert found.problem is None
    assert found.packages == ask_interpreter(None).packages


def test_what_answers_but_is_no_python_has_a_problem() -> None:
    assert ask_interpreter("true").problem == "is no Python: it answered ''"


def test_an_interpreter_that_is_none_has_a_problem(tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such thing >&2\nexit 3\n")
    broken.chmod(0o755)

    assert ask_interpreter(str(broken)).problem == "ended with status 3: no such thing"
    assert "cannot be started" in (ask_interpreter(str(tmp_path / "none")).problem or "")


def test_the_public_indexs_placeholders_are_known(tmp_path: Path) -> None:
    python = Interpreter("python", "3.10.1", {"torch-neuronx": "1.0", "neuronx-cc": "1.0.0", "torch": "1.0"})

    assert python.placeholders == ("torch-neuronx", "neuronx-cc")
    assert not python.has("torch-neuronx")
    assert not Interpreter("python", "3.10.1", {"torch-neuronx": "1.0.13"}).placeholders
