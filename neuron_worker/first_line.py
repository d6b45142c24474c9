"""Which device serves, and why: the first line of a server's log, before vLLM's banner and before anything is compiled.

What a front end resolves later says it again where it could not be foretold: in offline use, or where the options are
not well formed, which is then an error of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from . import resolve
from .config import user_options
from .errors import ConfigError

logger = logging.getLogger(__name__)

_foretold: set[str] = set()


def foretell(additional_config: object, environ: Mapping[str, str]) -> None:
    """By what was asked alone: no model is read."""
    if not isinstance(additional_config, Mapping | None):
        return
    try:
        line = resolve.device_line(user_options(additional_config or {}), environ)
    except ConfigError:  # said once the configuration is resolved, as an error
        return
    say(line)
    _foretold.add(line)


def say(line: str) -> None:
    """For each engine, unless it was foretold."""
    if line in _foretold:
        _foretold.remove(line)
    else:
        logger.info("%s", line)
