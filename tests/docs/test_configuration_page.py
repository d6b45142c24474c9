"""The configuration page says what the code reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_page_is_what_the_code_says() -> None:
    script = ROOT / "scripts" / "configuration_page.py"
    printed = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout
    assert (ROOT / "docs" / "configuration.md").read_text() == printed, f"run: python {script.name} --write"
