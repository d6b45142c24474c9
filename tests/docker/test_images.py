"""What the Dockerfiles say, held to a linter's rules and to ours; and the install steps they run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import ROOT

DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))


def names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_both_images_are_here() -> None:
    assert names(DOCKERFILES) == ["cpu.Dockerfile", "neuron.Dockerfile"]


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=names(DOCKERFILES))
def test_the_linter_has_nothing_to_say(dockerfile: Path) -> None:
    hadolint = Path(sys.executable).parent / "hadolint"

    assert subprocess.run([hadolint, dockerfile], capture_output=True, text=True).stdout == ""


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=names(DOCKERFILES))
def test_what_is_copied_is_here_and_what_it_starts_from_is_pinned(dockerfile: Path) -> None:
    text = dockerfile.read_text()
    copied = [word for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE) for word in line.split()]
    images = re.findall(r"^(?:FROM|ARG SDK_IMAGE=)\s*(\S+:\S+)", text, re.MULTILINE)

    assert copied
    assert [name for name in copied if not (ROOT / name).exists()] == []
    assert images
    assert not any(image.endswith(":latest") for image in images)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=names(DOCKERFILES))
def test_each_server_has_its_target(dockerfile: Path) -> None:
    text = dockerfile.read_text()

    assert re.findall(r"^FROM base AS (\w+)$", text, re.MULTILINE) == ["vllm", "sagemaker", "tgi"]
    assert re.findall(r'^ENTRYPOINT .*entrypoint.py", "(\w+)"\]$', text, re.MULTILINE) == ["vllm", "sagemaker", "tgi"]


def test_the_chip_s_images_never_fall_back_to_the_processor() -> None:
    assert "NEURONSERVE_REQUIRE_CHIP=1" in (ROOT / "docker" / "neuron.Dockerfile").read_text()
    assert "REQUIRE_CHIP" not in (ROOT / "docker" / "cpu.Dockerfile").read_text()


@pytest.mark.parametrize(
    ("target", "dockerfile", "stage", "image"),
    [
        ("neuronx-tgi", "neuron", "tgi", "neuronx-tgi"),
        ("neuronx-sagemaker", "neuron", "sagemaker", "neuronx-sagemaker"),
        ("neuronx-vllm", "neuron", "vllm", "neuronx-vllm"),
        ("tpu-tgi", "cpu", "tgi", "tpu-tgi"),
        ("cpu-tgi", "cpu", "tgi", "neuronserve-cpu-tgi"),
    ],
)
def test_make_builds_each_image(tmp_path: Path, target: str, dockerfile: str, stage: str, image: str) -> None:
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\necho "$@"\n')
    docker.chmod(0o755)

    made = subprocess.run(
        ["make", "--no-print-directory", target, f"DOCKER={docker}"], cwd=ROOT, capture_output=True, text=True
    ).stdout

    assert f"build --file docker/{dockerfile}.Dockerfile --target {stage} --tag {image}:0." in made
    assert f"--tag {image}:latest" in made
    assert ("TPUs are not driven" in made) == (target == "tpu-tgi")


@pytest.mark.full
def test_the_install_steps_in_a_clean_directory(tmp_path: Path) -> None:
    """The build context without what .dockerignore leaves out, installed, its source removed, and asked to start."""
    source, engine = tmp_path / "src", tmp_path / "engine"
    left_out = shutil.ignore_patterns(
        ".git", ".venv", ".peers", "__pycache__", "*.so", "*.egg-info", ".*_cache", "tests", "benchmarks", "wheelhouse"
    )
    shutil.copytree(ROOT, source, ignore=left_out)
    home = {"HOME": str(tmp_path)}
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}

    subprocess.run([source / "docker" / "install_engine.sh", sys.executable, engine], env=clean | home, check=True)
    shutil.rmtree(source)
    environ = clean | home | {"PATH": f"{engine}/bin:{os.environ['PATH']}"}
    start = [engine / "bin" / "python", ROOT / "docker" / "entrypoint.py"]
    helped = subprocess.run([*start, "tgi", "--help"], env=environ, capture_output=True, text=True, cwd=tmp_path)
    listed = subprocess.run([engine / "bin" / "pip", "list"], env=environ, capture_output=True, text=True).stdout

    assert helped.returncode == 0, helped.stderr
    assert "--max-batch-prefill-tokens" in helped.stdout
    assert "pytest" not in listed
    assert "s3fs" in listed
    assert list(engine.glob("lib/python3*/site-packages/neuronserve/neuron_worker/device/cpu/*.so"))
