"""A checkpoint's `config.json`, read with types: a value that is missing or malformed is a `LoadError` that names it.

Knows no architecture: `spec.py` says which keys matter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import LoadError


class ConfigJson:
    """The values of one JSON object. A key that is absent or null takes the default, and is an error without one.

    Several keys are spellings of one value; the first that is present counts.
    """

    def __init__(self, path: Path, values: Mapping[str, Any], parent: str = "") -> None:
        self.path = path
        self._values = values
        self._parent = parent  # "rope_scaling." inside that object, for messages

    @classmethod
    def in_directory(cls, model_dir: str | Path) -> ConfigJson:
        directory = Path(model_dir)
        path = directory / "config.json"
        if not directory.is_dir():
            raise LoadError(f"{directory} is not a directory; download the model and give its local directory")
        if not path.is_file():
            raise LoadError(f"{directory} has no config.json; give the directory of a Hugging Face checkpoint")
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise LoadError(f"{path} is not readable JSON ({error}); download it again") from error
        if not isinstance(values, dict):
            raise LoadError(f"{path} holds a {type(values).__name__}, not an object; download it again")
        return cls(path, values)

    def has(self, key: str) -> bool:
        """Whether the key is there at all, be it null."""
        return key in self._values

    def has_sections(self) -> bool:
        return any(isinstance(value, dict) for value in self._values.values())

    def get(self, *keys: str) -> Any:
        """The raw value of the first key that is present and not null, else None."""
        return next((self._values[key] for key in keys if self._values.get(key) is not None), None)

    def whole(self, *keys: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._get(keys, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.malformed(keys[0], value, f"a whole number of at least {minimum}")
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        value = self._get(keys, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise self.malformed(keys[0], value, "a number above 0")
        return float(value)

    def flag(self, *keys: str, default: bool) -> bool:
        value = self._get(keys, default)
        if not isinstance(value, bool):
            raise self.malformed(keys[0], value, "true or false")
        return value

    def text(self, *keys: str, default: str | None = None) -> str:
        value = self._get(keys, default)
        if not isinstance(value, str):
            raise self.malformed(keys[0], value, "a string")
        return value

    def section(self, *keys: str) -> ConfigJson | None:
        """The object under one of `keys`, or None."""
        for key in keys:
            value = self._values.get(key)
            if value is None:
                continue
            if not isinstance(value, dict):
                raise self.malformed(key, value, "an object")
            return ConfigJson(self.path, value, f"{self._parent}{key}.")
        return None

    def malformed(self, key: str, value: object, wanted: str) -> LoadError:
        return LoadError(f"{self._parent}{key} is {value!r} in {self.path}; it must be {wanted}")

    def _get(self, keys: tuple[str, ...], default: Any) -> Any:
        value = self.get(*keys)
        if value is not None:
            return value
        if default is None:
            raise LoadError(f"{self._parent}{keys[0]} is missing in {self.path}; the model cannot be built without it")
        return default
