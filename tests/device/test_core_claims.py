"""Two servers of one machine that name the same core."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from neuronserve.neuron_worker.device import core_claims, environment
from neuronserve.neuron_worker.device.errors import LoadError

ANOTHER_SERVER = """
import sys
from pathlib import Path
from neuronserve.neuron_worker.device import core_claims, environment
core_claims.FOLDER = Path(sys.argv[1])
environment.prepare({"NEURON_RT_VISIBLE_CORES": "0-1"}, 2)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def another() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", ANOTHER_SERVER, str(core_claims.FOLDER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_a_core_that_another_server_uses_is_refused_with_its_process(another: subprocess.Popen[str]) -> None:
    with pytest.raises(LoadError, match=rf"CORES=1-2: core 1 is already used by process {another.pid} \(.*=0-1"):
        environment.prepare({"NEURON_RT_VISIBLE_CORES": "1-2"}, 2)


def test_disjoint_cores_are_not(another: subprocess.Popen[str]) -> None:
    environment.prepare({"NEURON_RT_VISIBLE_CORES": "2-3"}, 2)


def test_a_server_that_was_killed_has_given_its_cores_back(another: subprocess.Popen[str]) -> None:
    another.kill()
    another.wait()
    environment.prepare({"NEURON_RT_VISIBLE_CORES": "0-1"}, 2)


def test_a_server_may_load_again() -> None:
    for _ in range(2):
        environment.prepare({"NEURON_RT_VISIBLE_CORES": "0-1"}, 2)


def test_where_no_claim_can_be_written_the_runtime_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(core_claims, "FOLDER", tmp_path / "file" / "cores")
    environment.prepare({"NEURON_RT_VISIBLE_CORES": "0-1"}, 2)


def test_a_core_named_twice_is_refused_with_both_numbers() -> None:
    with pytest.raises(LoadError, match=r"NEURON_RT_VISIBLE_CORES=0-1,1 names 3 cores, 2 different ones"):
        environment.prepare({"NEURON_RT_VISIBLE_CORES": "0-1,1"}, 2)
