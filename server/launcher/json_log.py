"""Log lines as JSON, in the shape of TGI's: one object per line, whoever writes it.

TGI's launcher nests the message under `fields`, its router does not; a line here has both, so that either kind of
parser finds it. Imports neither vLLM nor torch.
"""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TextIO

TARGET = "text_generation_launcher"


def line(level: str, message: str, target: str = TARGET, at: datetime | None = None, **more: object) -> str:
    moment = (at or datetime.now(UTC)).isoformat(timespec="microseconds").replace("+00:00", "Z")
    head = {"timestamp": moment, "level": level, "message": message, "fields": {"message": message}, "target": target}
    return json.dumps({**head, **more}, ensure_ascii=False)


class JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if record.exc_info:
            message = f"{message}\n{self.formatException(record.exc_info)}"
        level = {"WARNING": "WARN", "CRITICAL": "ERROR"}.get(record.levelname, record.levelname)
        is_ours = record.name.startswith("neuronserve.server.launcher")
        at = datetime.fromtimestamp(record.created, UTC)
        return line(level, message, TARGET if is_ours else record.name, at, process=record.process)


def configuration(level: str) -> dict[str, Any]:
    """For `logging.config`, as vLLM and uvicorn read it."""
    names = ("vllm", "uvicorn")
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"json": {"()": f"{__name__}.JsonFormatter"}},
        "handlers": {"json": {"class": "logging.StreamHandler", "formatter": "json", "stream": "ext://sys.stdout"}},
        "loggers": {name: {"handlers": ["json"], "level": level, "propagate": False} for name in names},
        "root": {"handlers": ["json"], "level": "WARNING"},
    }


class JsonLines(io.TextIOBase):
    """A stream whose every line is a JSON object: what is none becomes the message of one."""

    def __init__(self, inner: TextIO, target: str) -> None:
        self.inner, self.target = inner, target
        self._rest = ""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return self.inner.fileno()

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        self._write(lines)
        return len(text)

    def flush(self) -> None:
        self.inner.flush()

    def close(self) -> None:
        rest, self._rest = self._rest, ""
        self._write([rest])
        self.inner.flush()

    def _write(self, lines: Iterable[str]) -> None:
        for text in lines:
            if text.strip():
                level = "ERROR" if text.startswith(("error:", "Traceback")) else "INFO"
                self.inner.write(f"{text if text.startswith('{') else line(level, text, self.target)}\n")
