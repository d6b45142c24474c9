"""The last step: say where every setting came from, and become the server. One process from first to last."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import NoReturn

from . import json_log
from .arguments import BY_NAME
from .command import Command
from .deduce import BATCH_TOTAL, Settings

SERVING = "neuronserve.server.launcher.serving"


def table(settings: Settings, max_num_seqs: int) -> Iterator[str]:
    """One line for each setting that decides something; defaults of the others would bury it."""
    rows = [
        (name, _shown(settings, name, max_num_seqs), settings[name].origin)
        for name in settings
        if settings[name].origin != "default" and (settings.value(name) is not None or name != BATCH_TOTAL)
    ]
    rows = [row for row in rows if row[1]]
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, value, origin in rows:
        yield f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}"


def _shown(settings: Settings, name: str, max_num_seqs: int) -> str:
    if name in BY_NAME and BY_NAME[name].is_secret:
        return "(not shown)"
    value = settings.value(name)
    if name == "max_num_seqs":
        value = max_num_seqs
    return "" if value is None else str(value)


def say(lines: Sequence[str], as_json: bool, level: str = "INFO") -> None:
    for text in lines:
        print(json_log.line(level, text) if as_json else text, flush=True)


def become(command: Command, environ: Mapping[str, str]) -> NoReturn:
    """The server, in this process; the words of an --api-key end with the old program."""
    if find_spec("vllm") is None:
        raise SystemExit("Error: vLLM is not installed here: make install, or pip install 'neuronserve[serve]'")
    sys.stdout.flush()
    words = [sys.executable, "-m", SERVING, *command.argv]
    os.execve(sys.executable, words, {**environ, **command.variables})
