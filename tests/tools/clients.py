"""An environment of their own for clients that want other versions of what the server has: made once, then kept.

text-generation and langchain-huggingface need a huggingface_hub older than transformers'. Their exact versions, and of
all they need, are in `clients.txt`; the environment lies in the user's cache under the digest of that file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PINS = Path(__file__).with_name("clients.txt")
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "neuronserve" / "test-clients"


def python() -> Path:
    """The interpreter that has the clients."""
    digest = hashlib.sha256(PINS.read_bytes() + sys.version.encode()).hexdigest()[:16]
    folder = CACHE / digest
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{digest}.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            install = ["-m", "pip", "install", "--quiet", "--no-deps", "--requirement", PINS]
            subprocess.run([folder / "bin" / "python", *install], check=True)
            (folder / "done").touch()
    return folder / "bin" / "python"


def run(script: Path, *arguments: str) -> Any:
    """What the script prints, as JSON; it runs with the clients, and without this suite's packages."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HF_"))}
    outcome = subprocess.run(
        [python(), "-I", script, *arguments], capture_output=True, text=True, env=environ, timeout=300
    )
    assert outcome.returncode == 0, outcome.stderr[-4000:]
    return json.loads(outcome.stdout)
