"""A start-up error is one readable line and a non-zero exit; the traceback is for debug logging.

Covers the process a person started (`vllm serve`, `python -m vllm.…`) and the engine process under it. A script that
makes an `LLM` gets its exception as any Python program does. Knows no vLLM beyond the names of its loggers.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from .errors import ConfigError

HINT = "VLLM_LOGGING_LEVEL=DEBUG shows the traceback"

ENGINE_LOGGER = "vllm.v1.engine.core"
ENGINE_MESSAGE = "EngineCore failed to start."
FRONT_END_MESSAGE = "Engine core initialization failed"

PLAIN = ("ConfigError", "ValueError", "RuntimeError", "NotImplementedError", "OSError", "VLLMValidationError")
"""Errors whose message says enough without the class's name."""


def one_line(error: BaseException) -> str:
    """What a person needs of an exception."""
    text = " ".join(_message(error).split())
    kind = type(error).__name__
    if not text:
        return kind
    return (
        text
        if kind in PLAIN or kind.endswith(("DeviceError", "LoadError", "Model", "ValidationError"))
        else f"{kind}: {text}"
    )


def _message(error: BaseException) -> str:
    reports = getattr(error, "errors", None)  # pydantic lists what it refused, and surrounds it with a page of its own
    if callable(reports) and type(error).__name__ == "ValidationError":
        return "; ".join(dict.fromkeys(_reported(report) for report in reports()))
    return str(error)


def _reported(report: dict[str, object]) -> str:
    message = str(report.get("msg", "")).removeprefix("Value error, ").removeprefix("Assertion failed, ")
    where = ".".join(str(part) for part in report.get("loc", ()) or ())  # type: ignore[attr-defined]
    value = report.get("input")
    if isinstance(value, (bool, int, float, str)) and report.get("type") not in ("value_error", "assertion_error"):
        message = f"{message}, not {value!r}"  # pydantic's own words never say what it got
    return f"{where}: {message}" if where else message


def debugging() -> bool:
    return logging.getLogger("vllm").isEnabledFor(logging.DEBUG)


def is_vllm_command() -> bool:
    """Whether this process is vLLM's own program, rather than somebody's script."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    module = getattr(spec, "name", None) or ""
    return module.startswith("vllm.") or os.path.basename(sys.argv[0] if sys.argv else "") == "vllm"


def install_hook() -> None:
    """In vLLM's own program an error that nobody caught ends in one line."""
    if is_vllm_command() and sys.excepthook is not _hook:
        sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if debugging() or not isinstance(error, Exception):
        sys.__excepthook__(kind, error, trace)
        return
    text = one_line(error)
    if text.startswith(FRONT_END_MESSAGE):
        text = "the engine did not start; its error is above"
    hint = "" if isinstance(error, ConfigError) else f" ({HINT})"  # that one says all there is to know
    print(f"error: {text}{hint}", file=sys.stderr)


@contextmanager
def engine_errors_in_one_line() -> Iterator[None]:
    """Around the engine process's whole life: an error before it is ready is logged as one line and exits with 1."""
    shortener = _Shortener()
    logger = logging.getLogger(ENGINE_LOGGER)
    logger.addFilter(shortener)
    try:
        yield
    except Exception:
        if not shortener.used:
            raise
        raise SystemExit(1) from None  # multiprocessing prints the traceback of anything else
    finally:
        logger.removeFilter(shortener)


class _Shortener(logging.Filter):
    """vLLM's "failed to start" record, its traceback replaced by the error's own words."""

    used = False

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and record.msg == ENGINE_MESSAGE and not debugging():
            record.msg, record.args = "%s (%s)", (one_line(error), HINT)
            record.exc_info = record.exc_text = None
            self.used = True
        return True
