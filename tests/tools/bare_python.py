"""An interpreter that has numpy and torch and no server: what an SDK's environment looks like from outside."""

from __future__ import annotations

import subprocess
import sys
from importlib import util
from pathlib import Path

NEEDED = ("numpy", "torch")
OF_TORCH = ("torchgen", "functorch", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "filelock", "fsspec")
SINGLE_FILES = ("typing_extensions",)
MUST_BE_ABSENT = ("vllm", "transformers", "neuronserve", "safetensors", "pydantic")


def bare_python(directory: Path) -> str:
    """A virtual environment whose packages are links to this one's: torch is too large to copy or to fetch again."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    [packages] = directory.glob("lib/python*/site-packages")
    for name in (*NEEDED, *OF_TORCH, *SINGLE_FILES):
        spec = util.find_spec(name)
        if spec is None or spec.origin is None:
            assert name not in NEEDED, name
            continue
        origin = Path(spec.origin)
        _link(packages, origin if name in SINGLE_FILES else origin.parent)
        _link(packages, origin.parent.with_name(f"{name}.libs"))  # a wheel's shared libraries lie beside it
    return str(directory / "bin" / "python")


def python_that_finds(packages: str, directory: Path) -> str:
    """This interpreter, with a folder of packages of its own: what an SDK's environment is to a server."""
    script = directory / "python"
    script.write_text(f'#!/bin/sh\nPYTHONPATH="{packages}" exec "{sys.executable}" "$@"\n')
    script.chmod(0o755)
    return str(script)


def _link(packages: Path, target: Path) -> None:
    if target.exists():
        (packages / target.name).symlink_to(target)


def importable(python: str, names: tuple[str, ...]) -> list[str]:
    """Those of `names` that this interpreter finds."""
    code = "import sys, importlib.util as u; print(*[n for n in sys.argv[1:] if u.find_spec(n)])"
    found = subprocess.run([python, "-I", "-c", code, *names], capture_output=True, text=True, check=True)
    return found.stdout.split()
