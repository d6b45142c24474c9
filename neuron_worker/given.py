"""What a configuration is decided from, and the lines that deciding leaves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .config import ServeRequest
from .device.base import Capabilities
from .device.graph.spec import ModelSpec
from .environment import Environment
from .exported import ExportSettings


@dataclass(frozen=True)
class Given:
    """Filled by `resolve`; `notes` and `warnings` grow as it is read."""

    request: ServeRequest
    values: Mapping[str, object]  # of the options
    env: Environment
    override: Mapping[str, Any]
    backend: str
    capabilities: Capabilities
    spec: ModelSpec
    export: ExportSettings | None
    notes: list[str]
    warnings: list[str]

    def number(self, option: str) -> int | None:
        value = self.values[option]
        return None if value is None else int(str(value))

    def text(self, option: str) -> str | None:
        return optional_text(self.values[option])


def optional_text(value: object) -> str | None:
    return None if value is None else str(value)
