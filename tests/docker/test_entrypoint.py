"""The images' entrypoint: which command it becomes, and as whom."""

from __future__ import annotations

import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from neuronserve.server.launcher import sagemaker
from neuronserve.server.launcher.command import Device, command
from neuronserve.server.launcher.main import settle
from neuronserve.server.launcher.model import Model
from neuronserve.server.launcher.reading import read

from .conftest import ROOT

import entrypoint  # isort: skip

LAUNCHER = "text-generation-launcher"
ROOT_ONLY = pytest.mark.skipif(os.geteuid() != 0, reason="dropping root needs root")


@pytest.mark.parametrize(
    ("role", "arguments", "becomes"),
    [
        ("tgi", ["--model-id", "/data/m"], [LAUNCHER, "--model-id", "/data/m"]),
        ("tgi", ["--help"], [LAUNCHER, "--help"]),
        ("sagemaker", ["serve"], [LAUNCHER, "serve"]),
        ("sagemaker", [], [LAUNCHER, "serve"]),
        ("vllm", ["--model", "m"], ["vllm", "serve", "--model", "m"]),
        ("vllm", ["serve", "m", "--device", "neuron"], ["vllm", "serve", "m", "--device", "neuron"]),
        ("vllm", ["vllm", "serve", "m"], ["vllm", "serve", "m"]),
    ],
)
def test_command_line(role: str, arguments: Sequence[str], becomes: list[str]) -> None:
    assert entrypoint.command_line(role, arguments) == becomes


@pytest.mark.parametrize(
    ("words", "role"),
    [
        (["tgi", "--model-id", "serve"], "tgi"),
        (["tgi", "serve"], "sagemaker"),
        (["tgi"], "tgi"),
        (["sagemaker", "serve"], "sagemaker"),
        (["vllm", "serve", "m"], "vllm"),
        (["vllm", "serve", "--port", "8000"], "vllm"),
        (["vllm", "m"], "vllm"),
        (["vllm", "serve"], "sagemaker"),
    ],
)
def test_the_role(words: Sequence[str], role: str) -> None:
    """The word of SageMaker is meant for it in the image for hosts, too, whose PORT is another."""
    assert entrypoint.role_of(words) == role
    assert entrypoint.listening_port(role, entrypoint.command_line(role, words[1:]), {"PORT": "80"}) == {
        "tgi": 80,
        "sagemaker": 8080,
        "vllm": 8000,
    }.get(role)


@pytest.mark.parametrize(
    ("role", "arguments", "environ", "port"),
    [
        ("tgi", [], {"PORT": "80"}, 80),
        ("tgi", [], {}, 3000),
        ("tgi", ["-p", "8081"], {"PORT": "80"}, 8081),
        ("tgi", ["--port=8081"], {"PORT": "80"}, 8081),
        ("sagemaker", ["serve"], {"PORT": "80"}, 8080),
        ("sagemaker", ["serve"], {"SAGEMAKER_BIND_TO_PORT": "8123"}, 8123),
        ("sagemaker", ["serve", "--port", "8081"], {}, 8081),
        ("vllm", ["m"], {"PORT": "80"}, 8000),
        ("vllm", ["m", "--port", "9000", "--port", "9001"], {}, 9001),
        ("vllm", ["m", "--port"], {}, 8000),
    ],
)
def test_listening_port(role: str, arguments: Sequence[str], environ: dict[str, str], port: int) -> None:
    command = entrypoint.command_line(role, arguments)

    assert entrypoint.listening_port(role, command, environ) == port


PORTS: list[tuple[list[str], dict[str, str]]] = [
    ([], {}),
    ([], {"PORT": "80"}),
    (["-p8080"], {"PORT": "80"}),
    (["-p=8080"], {}),
    (["-p", "8080", "--port", "9000"], {}),
    (["--port=8080", "-p9000"], {}),
    (["--prometheus-port", "9000"], {}),
    (["--", "--port", "9000"], {"PORT": "80"}),
    ([], {"SM_ON_PORT": "9000"}),
    ([], {"SM_ON_PORT": "9000", "PORT": "80"}),
    ([], {"SAGEMAKER_BIND_TO_PORT": "9001", "PORT": "80"}),
    ([], {"SAGEMAKER_BIND_TO_PORT": " ", "PORT": " 80 "}),
    (["serve"], {}),
    (["serve"], {"PORT": "80"}),
    (["serve"], {"SM_ON_PORT": "9000", "PORT": "80"}),
    (["serve"], {"SM_ON_PORT": "9000", "SAGEMAKER_BIND_TO_PORT": "9001"}),
    (["serve", "-p8081"], {"SAGEMAKER_BIND_TO_PORT": "9001"}),
]


@pytest.mark.parametrize(("arguments", "environ"), PORTS, ids=str)
def test_the_health_check_asks_where_the_launcher_s_server_listens(
    arguments: list[str], environ: dict[str, str]
) -> None:
    role = entrypoint.role_of(["tgi", *arguments])
    typed = entrypoint.command_line(role, arguments)

    words, is_sagemaker = sagemaker.without_serve(typed[1:])
    asked = read(words, sagemaker.environment(environ) if is_sagemaker else environ)
    settings = settle(asked, is_sagemaker, Model("m", positions=64))
    server = command(settings, Device(8, 64, "cpu"), environ, asked.server_arguments).argv
    ports = [value for name, value in pairwise(server) if name == "--port"]

    assert str(entrypoint.listening_port(role, typed, environ)) == ports[-1]


def nobody() -> pwd.struct_passwd:
    return pwd.getpwnam("nobody")


def closed_to_others(folder: Path) -> Path:
    """A directory of root's, reachable by everybody: what a root-owned /data is."""
    for above in (folder, *folder.parents):
        if above.owner() == "root" and above != Path("/") and not above.stat().st_mode & 0o001:
            above.chmod(above.stat().st_mode | 0o011)
    data = folder / "data"
    data.mkdir(mode=0o755)
    return data


@ROOT_ONLY
def test_root_goes_where_an_ordinary_user_can_serve(tmp_path: Path) -> None:
    data = closed_to_others(tmp_path)
    os.chown(data, nobody().pw_uid, -1)

    assert entrypoint.obstacles_as(nobody(), 0, [data, data / "not" / "yet"], []) == []


@ROOT_ONLY
def test_root_stays_for_a_root_owned_data_directory(tmp_path: Path) -> None:
    data = closed_to_others(tmp_path)

    assert entrypoint.obstacles_as(nobody(), 0, [data], []) == [f"write {data}"]


@ROOT_ONLY
def test_root_stays_for_files_that_root_left_in_the_data_directory(tmp_path: Path) -> None:
    data = closed_to_others(tmp_path)
    os.chown(data, nobody().pw_uid, -1)
    (data / "models").mkdir(mode=0o755)

    assert entrypoint.obstacles_as(nobody(), 0, [data], []) == [f"write {data}"]


@ROOT_ONLY
def test_root_stays_for_a_device_of_root(tmp_path: Path) -> None:
    device = closed_to_others(tmp_path) / "neuron0"
    device.touch(mode=0o600)

    assert entrypoint.obstacles_as(nobody(), 0, [], [str(device)]) == [f"open {device}"]


@ROOT_ONLY
def test_a_device_of_a_group_is_opened_through_the_group(tmp_path: Path) -> None:
    device = closed_to_others(tmp_path) / "neuron0"
    device.touch()
    os.chown(device, 0, 4242)
    device.chmod(0o660)

    assert entrypoint.obstacles_as(nobody(), 0, [], [str(device)]) == []


def test_a_taken_port_is_left_to_the_server_to_report() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()

        assert entrypoint.obstacles(taken.getsockname()[1], [], []) == []


@ROOT_ONLY
def test_the_server_replaces_the_entrypoint_as_the_ordinary_user(tmp_path: Path) -> None:
    """One process from docker's signal to the server's: a stand-in for the launcher says who and what it is."""
    data = closed_to_others(tmp_path)
    os.chown(data, nobody().pw_uid, -1)
    launcher = tmp_path / LAUNCHER
    launcher.write_text('#!/bin/sh\necho "$$ $(id -un) $HOME $*"\n')
    launcher.chmod(0o755)
    start = "import entrypoint; entrypoint.USER = 'nobody'; entrypoint.main(['tgi', '--port', '0'])"
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HF_HOME": str(data), "PYTHONPATH": str(ROOT / "docker")}

    with subprocess.Popen(
        [sys.executable, "-c", start], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        out, err = process.communicate(timeout=60)

    assert out.split() == [str(process.pid), "nobody", nobody().pw_dir, "--port", "0"], err
    assert err == "entrypoint: serving as user nobody\n"


def test_a_file_system_that_is_read_only_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entrypoint, "PORT_FILE", tmp_path / "missing" / "port")
    entrypoint.note_port(80)
    assert capsys.readouterr().err == (
        f"entrypoint: the health check cannot find port 80: {tmp_path}/missing/port: No such file or directory; "
        f"run the container with --tmpfs {tmp_path}/missing\n"
    )


def test_the_port_is_left_for_the_health_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrypoint, "PORT_FILE", tmp_path / "port")
    entrypoint.note_port(80)
    assert (tmp_path / "port").read_text() == "80\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["vllm", "serve"], "`serve` alone is SageMaker's: text-generation-launcher serves, and reads its variables"),
        (
            ["vllm", "serve", "m"],
            "SM_ON_BATCH_SIZE, SM_ON_MODEL: no effect on `vllm serve`; give its flags, or the word `serve` alone",
        ),
        (["tgi", "serve"], None),
        (["sagemaker"], None),
        (["tgi"], None),
    ],
)
def test_what_the_vllm_image_makes_of_sagemaker_is_said(words: Sequence[str], line: str | None) -> None:
    environ = {"SM_ON_MODEL": "m", "SM_ON_BATCH_SIZE": "4", "PATH": "/bin"}

    assert entrypoint.remarks(words[0], entrypoint.role_of(words), environ) == ([line] if line else [])


def test_an_unknown_role_is_refused_by_name() -> None:
    with pytest.raises(SystemExit, match="one of tgi, sagemaker, vllm; given: 'bash'"):
        entrypoint.main(["bash"])
