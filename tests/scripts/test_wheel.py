"""Our sdist and wheel: everything under one namespace, the kernels compiled inside, loadable where it lands."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from .conftest import ROOT

FOLDERS = ("server", "neuron_worker", "bucketing", "speculative")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist") / "dist"
    subprocess.run([sys.executable, ROOT / "scripts" / "wheelhouse.py", "--ours-only", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("*.whl")
    return wheel


def test_the_sdist_has_what_make_and_the_tests_read(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    folders = ("docker", "docs", "examples", "scripts", "benchmarks", "tests/data")
    files = [path for folder in folders for path in (ROOT / folder).iterdir() if path.is_file()]
    wanted = {"Makefile", ".ci/run", ".dockerignore", *(str(path.relative_to(ROOT)) for path in files)}

    assert wanted - inside == set()


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_is_for_any_python_of_this_platform(wheel: Path) -> None:
    assert wheel.name.startswith("neuronserve-0.1.0-py3-none-linux_")


def test_nothing_lands_outside_the_namespace(wheel: Path) -> None:
    assert {name.split("/")[0] for name in names(wheel)} == {"neuronserve", "neuronserve-0.1.0.dist-info"}


def test_every_module_of_the_checkout_is_inside(wheel: Path) -> None:
    modules = {f"neuronserve/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}

    assert modules <= names(wheel), "a new package must be listed in pyproject.toml"


def test_the_shipped_heads_are_inside(wheel: Path) -> None:
    heads = {f"neuronserve/{path.relative_to(ROOT)}" for path in (ROOT / "speculative/heads").glob("*/*")}

    assert heads
    assert heads <= names(wheel)


def test_the_kernels_are_inside_compiled_and_as_source(wheel: Path) -> None:
    cpu = "neuronserve/neuron_worker/device/cpu"
    sources = {f"{cpu}/kernels/{path.name}" for path in (ROOT / "neuron_worker/device/cpu/kernels").glob("*.[ch]")}

    assert sources
    assert sources <= names(wheel)
    assert len([name for name in names(wheel) if name.endswith(".so")]) == 1


def test_vllm_finds_the_plugin_and_the_shell_the_command(wheel: Path) -> None:
    points = zipfile.ZipFile(wheel).read("neuronserve-0.1.0.dist-info/entry_points.txt").decode()

    assert "neuronserve = neuronserve.server.cli:main" in points
    assert "neuronserve = neuronserve.neuron_worker.plugin:register\n" in points
    assert "neuronserve_general = neuronserve.neuron_worker.plugin:register_general\n" in points


def test_an_installed_wheel_loads_its_own_kernels(wheel: Path, tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", wheel],
        check=True,
    )
    program = "from neuronserve.neuron_worker.device.cpu.build import find; print(find())"
    # -S: this environment's own editable install must not answer in its place; the compiler may not either.
    found = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site"), "PATH": "", "CC": ""},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    ).stdout

    assert Path(found.strip()).is_relative_to(tmp_path / "site")
