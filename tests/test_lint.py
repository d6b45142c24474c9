"""The repository checks itself: lint rules, format and strict types, as `make lint` runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import lint  # noqa: E402


@pytest.mark.parametrize("name", lint.checks())
def test_clean(name: str) -> None:
    environment = os.environ | {"MYPYPATH": str(lint.typed_tree())}

    outcome = subprocess.run(lint.checks()[name], cwd=ROOT, env=environment, capture_output=True, text=True)

    assert outcome.returncode == 0, f"{name}:\n{outcome.stdout}{outcome.stderr}"
