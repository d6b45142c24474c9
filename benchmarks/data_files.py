"""Where a benchmark's larger data lies: in the directory that is given, or in its folder of that kind there."""

from __future__ import annotations

from pathlib import Path

TRACES, CORPORA, PROMPTS = "traces", "corpora", "prompts"


def find(data: Path | None, folder: str, name: str) -> Path | None:
    """`data/name` or `data/folder/name`; None where neither is a file."""
    if data is None:
        return None
    return next((path for path in (data / name, data / folder / name) if path.is_file()), None)
