"""vLLM's own tests against our scheduler: they take half a minute and need vLLM's source from the package index."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "vllm_own_tests.py"


@pytest.mark.full
def test_vllm_s_own_tests_pass() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
