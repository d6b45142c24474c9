"""What configuration refuses. Knows neither vLLM nor a device."""

from __future__ import annotations


class ConfigError(Exception):
    """A setting that cannot be served; the message names key, value and remedy.

    Not a ValueError: pydantic, which vLLM's configuration classes are made of, would bury one in a report of its own.
    """
