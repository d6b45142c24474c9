"""The images' scripts as modules: in an image they lie beside the engine, in no package."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "docker"))
