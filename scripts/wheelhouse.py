"""`make wheelhouse`: every wheel an installation needs, for people who do not clone; `make dist`: our own two files.

In: this checkout and the environment `scripts/set_up.py` made. Out: a folder with our wheel, the pure-Python vLLM
wheel, torch's CPU wheel, all they need, and requirements.lock with the sha256 of each. It installs without an index,
with every digest checked:

    pip install --no-index --no-deps --find-links wheelhouse -r wheelhouse/requirements.lock

`pip install --no-index --find-links wheelhouse 'neuronserve[serve]'` works too; pip's resolver then adds triton, which
lies there for its sake and has no use without a GPU.

    python scripts/wheelhouse.py [--ours-only] FOLDER
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from packaging.utils import parse_wheel_filename
from set_up import Environment, SetUpError, build_vllm, locked, pinned, say, torch_source


def build_ours(environment: Environment, folder: Path) -> None:
    """The sdist, and the wheel from the sdist: what the sdist lacks cannot be in the wheel."""
    backend = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    environment.run("-c", backend, str(folder))
    (sdist,) = folder.glob("neuronserve-*.tar.gz")
    environment.pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sdist))


def add_vllm(environment: Environment, folder: Path) -> None:
    """The wheel set-up built, under its true tag: setuptools names it after this Python, yet it holds Python alone."""
    kept = sorted(environment.wheels.glob("vllm-*.whl"))
    shutil.copy(kept[0] if kept else build_vllm(environment), folder)
    (wheel,) = folder.glob("vllm-*.whl")
    tags = ["--python-tag", "py3", "--abi-tag", "none", "--platform-tag", "any"]
    environment.run("-m", "wheel", "tags", "--remove", *tags, str(wheel))


def add_requirements(environment: Environment, folder: Path) -> None:
    """What set-up installed, from pip's cache; the few without a wheel are built."""
    environment.pip("download", "--no-deps", "--dest", str(folder), *torch_source(environment), pinned("torch"))
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write("\n".join(locked("serve", "gpu")) + "\n")
        wanted.flush()
        environment.pip("wheel", "--no-deps", "--wheel-dir", str(folder), "--requirement", wanted.name)


def write_lock(folder: Path) -> None:
    left_out = {line.split("==")[0] for line in locked("gpu")}
    lines = []
    for wheel in sorted(folder.glob("*.whl"), key=lambda path: path.name.lower()):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        if name not in left_out:
            lines.append(f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}")
    (folder / "requirements.lock").write_text("\n".join(lines) + "\n")


def make(environment: Environment, folder: Path, ours_only: bool) -> None:
    build_ours(environment, folder)
    if ours_only:
        return
    for sdist in folder.glob("*.tar.gz"):
        sdist.unlink()
    say("wheelhouse: vLLM")
    add_vllm(environment, folder)
    say("wheelhouse: everything else")
    add_requirements(environment, folder)
    write_lock(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description="Collect wheels for an installation without an index.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ours-only", action="store_true", help="our sdist and wheel, nothing else")
    options = parser.parse_args()
    folder: Path = options.folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        # Beside its place and renamed when complete; what an earlier run left there goes.
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
            made = Path(scratch) / folder.name
            made.mkdir()
            make(Environment(Path(sys.prefix)), made, options.ours_only)
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    except (SetUpError, subprocess.CalledProcessError) as error:
        say(f"neuronserve: {error}")
        return 1
    size = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    say(f"{options.folder}: {len(list(folder.iterdir()))} files, {size:.0f} MB")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
