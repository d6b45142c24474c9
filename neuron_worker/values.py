"""Settings as shells, JSON and Python leave them, turned into typed values.

A parser takes anything and returns the typed value, or raises ValueError saying what it expected; the caller knows
the key and makes the sentence. Strings "True" and "8" are what a classic command line delivers, so they are
understood everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from math import isfinite

from .errors import ConfigError

Parser = Callable[[object], object]

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off", "")


def boolean(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, int) and value in (0, 1):
        return value == 1
    word = value.strip().lower() if isinstance(value, str) else None
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ValueError("expected True or False")


def integer(value: object) -> int:
    number = _number(value)
    if number is None or number != int(number):
        raise ValueError("expected a whole number")
    return int(number)


def positive(value: object) -> int:
    number = _number(value)
    if number is None or number != int(number) or number < 1:
        raise ValueError("expected a whole number of at least 1")
    return int(number)


def number(value: object) -> float:
    found = _number(value)
    if found is None:
        raise ValueError("expected a number")
    return found


def text(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("expected some text")
    return value.strip()


def one_of(*choices: str, aliases: dict[str, str] | None = None) -> Parser:
    """The choice that `value` spells, whatever its case; `aliases` are other spellings of a choice."""
    spellings = {choice.lower(): choice for choice in choices} | (aliases or {})

    def parse(value: object) -> str:
        found = spellings.get(str(value).strip().lower())
        if found is None:
            raise ValueError(f"expected {' or '.join(choices)}{near(str(value), choices)}")
        return found

    return parse


def list_of(parser: Parser) -> Parser:
    def parse(value: object) -> list[object]:
        if not isinstance(value, (list, tuple)):
            raise ValueError("expected a list")
        return [parser(item) for item in value]

    return parse


def one_or_list_of(parser: Parser) -> Parser:
    several = list_of(parser)

    def parse(value: object) -> object:
        return several(value) if isinstance(value, (list, tuple)) else parser(value)

    return parse


def near(word: str, known: Iterable[str]) -> str:
    """'; did you mean x?', or nothing."""
    match = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {match[0]}?" if match else ""


def parse(key: str, value: object, parser: Parser) -> object:
    """The typed value, or a `ConfigError` that names key and value."""
    try:
        return parser(value)
    except ValueError as error:
        raise ConfigError(f"{key}={value!r}: {error}") from None


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if not isinstance(value, (int, float, str)):
        return None
    try:
        found = float(value)
    except ValueError:
        return None
    return found if isfinite(found) else None
