"""`make lint`: ruff's rules and format over everything, mypy's strict rules over the packages.

mypy must see the folders under the names they are imported by, and an editable install's redirection is invisible to
it; so the folders are linked into build/typed/neuronserve and checked there.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("server", "neuron_worker", "bucketing", "speculative")


def typed_tree() -> Path:
    """A folder in which `neuronserve` is a package with our folders in it."""
    tree = ROOT / "build" / "typed"
    namespace = tree / "neuronserve"
    namespace.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        link = namespace / package
        if not link.is_symlink():
            link.symlink_to(ROOT / package)
    return tree


def checks() -> dict[str, list[str]]:
    python = sys.executable
    return {
        "ruff check": [python, "-m", "ruff", "check", "."],
        "ruff format": [python, "-m", "ruff", "format", "--check", "."],
        "mypy": [python, "-m", "mypy", "-p", "neuronserve"],
    }


def main() -> int:
    environment = os.environ | {"MYPYPATH": str(typed_tree())}
    failed = [
        name for name, command in checks().items() if subprocess.run(command, cwd=ROOT, env=environment).returncode
    ]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return bool(failed)


if __name__ == "__main__":
    raise SystemExit(main())
