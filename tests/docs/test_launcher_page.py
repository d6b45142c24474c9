"""The launcher's page has the table that the launcher reads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_page_has_todays_arguments() -> None:
    script = ROOT / "scripts" / "launcher_page.py"
    table = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout
    page = (ROOT / "docs" / "launcher.md").read_text()
    begin, end = page.index("<!-- arguments:"), page.index("<!-- end of arguments -->")
    assert page[begin:end].partition("\n")[2] == table, f"run: python {script.relative_to(ROOT)} --write"
