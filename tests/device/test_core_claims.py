"""Two servers of one machine that name the same core."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
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


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("made_before", [False, True])
def test_claims_are_open_to_the_servers_of_every_user(made_before: bool) -> None:
    if made_before:
        core_claims.FOLDER.mkdir(mode=0o755)
    mask = os.umask(0o077)
    try:
        environment.prepare({"NEURON_RT_VISIBLE_CORES": "0"}, 1)
    finally:
        os.umask(mask)

    assert mode_of(core_claims.FOLDER) == 0o1777
    assert mode_of(core_claims.FOLDER / "0") == 0o666


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(core_claims.logger, "warning", lambda line, *values: lines.append(line % values))
    return lines


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_in_place_of_a_claim_is_not_followed(
    link: Callable[[Path, Path], None], tmp_path: Path, logged: list[str]
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("a user's")
    core_claims.FOLDER.mkdir()
    link(precious, core_claims.FOLDER / "0")

    environment.prepare({"NEURON_RT_VISIBLE_CORES": "0"}, 1)

    assert precious.read_text() == "a user's"
    [line] = logged
    assert line.endswith(f"claims cannot be written ({core_claims.FOLDER / '0'} is a link or no file: remove it)")


def test_a_link_in_place_of_the_folder_is_not_followed(tmp_path: Path, logged: list[str]) -> None:
    (tmp_path / "elsewhere").mkdir()
    core_claims.FOLDER.symlink_to(tmp_path / "elsewhere")

    environment.prepare({"NEURON_RT_VISIBLE_CORES": "0"}, 1)

    assert not list((tmp_path / "elsewhere").iterdir())
    [line] = logged
    assert line.endswith(f"claims cannot be written ({core_claims.FOLDER} is a link or no folder: remove it)")


def test_what_another_user_wrote_into_a_claim_is_one_short_line(another: subprocess.Popen[str]) -> None:
    (core_claims.FOLDER / "1").write_text("process 1\n\x1b[2J" + "x" * 10_000)

    with pytest.raises(LoadError) as caught:
        environment.prepare({"NEURON_RT_VISIBLE_CORES": "1"}, 1)

    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_a_server_may_load_again() -> None:
    for _ in range(2):
        environment.prepare({"NEURON_RT_VISIBLE_CORES": "0-1"}, 2)


def test_where_no_claim_can_be_written_the_runtime_decides_and_one_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: list[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(core_claims, "FOLDER", tmp_path / "file" / "cores")
    environment.prepare({"NEURON_RT_VISIBLE_CORES": "0-1"}, 2)

    [line] = logged
    assert line.startswith("NEURON_RT_VISIBLE_CORES=0-1: whether another server uses these cores is not checked")
    assert str(core_claims.FOLDER) in line


def test_a_core_named_twice_is_refused_with_both_numbers() -> None:
    with pytest.raises(LoadError, match=r"NEURON_RT_VISIBLE_CORES=0-1,1 names 3 cores, 2 different ones"):
        environment.prepare({"NEURON_RT_VISIBLE_CORES": "0-1,1"}, 2)


@pytest.mark.parametrize("half", ["0-", "-1", "0,,1", "0-1-2"])
def test_half_a_range_of_cores_is_refused(half: str) -> None:
    with pytest.raises(LoadError, match=rf"CORES='{half}': .* is no core and no range; give cores such as 0-3"):
        environment.prepare({"NEURON_RT_VISIBLE_CORES": half}, 1)


def test_a_range_of_cores_that_runs_backwards_is_refused() -> None:
    with pytest.raises(LoadError, match=r"NEURON_RT_VISIBLE_CORES='0,3-1': '3-1' ends before it starts; write 1-3"):
        environment.prepare({"NEURON_RT_VISIBLE_CORES": "0,3-1"}, 1)
