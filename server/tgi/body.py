"""A request's body: bytes in, JSON out; what goes wrong on the way is answered in plain text, as TGI's router does.

Messages are those of the router's JSON parser, with its line and column. Knows no fields.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from math import isfinite
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from .errors import TransportError

NOT_JSON = "Failed to parse the request body as JSON: "
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_MAX_DIGITS = 4000  # of an integer; Python refuses to read much longer ones


@dataclass(frozen=True)
class Body:
    """Made by `read`. `text` is kept for the positions that errors quote."""

    text: str
    value: Any


async def read(request: Request, limit: int) -> Body:
    check_content_type(request.headers.get("content-type", ""))
    return parse(await _read_bytes(request, limit))


def check_content_type(header: str) -> None:
    kind, _, subtype = header.split(";")[0].strip().lower().partition("/")
    if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise TransportError(415, "Expected request with `Content-Type: application/json`")


async def _read_bytes(request: Request, limit: int) -> bytes:
    """All of it; one that is too long is read to its end, since some clients listen only when they have sent all."""
    pieces: list[bytes] = []
    size = 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size <= limit:
                pieces.append(piece)
    except ClientDisconnect:
        raise TransportError(400, "the client left before the body had come") from None
    if size > limit:
        raise TransportError(413, "Failed to buffer the request body: length limit exceeded")
    return b"".join(pieces)


def parse(raw: bytes) -> Body:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        refuse("invalid unicode code point", raw[: error.start].decode(), error.start)
    try:
        value = json.loads(text, parse_float=_finite, parse_int=_integer, parse_constant=_not_a_number)
    except json.JSONDecodeError as error:
        refuse(*_as_the_router_says_it(error, text))
    except RecursionError:
        refuse("recursion limit exceeded", text, len(text))
    except _NumberError as error:
        message, word = error.args
        refuse(message, text, text.find(word) + len(word))
    if _LONE_SURROGATE.search(raw) and _has_lone_surrogate(value):
        refuse("lone leading surrogate in hex escape", text, len(text))
    return Body(text, value)


def refuse(message: str, text: str, index: int) -> NoReturn:
    raise TransportError(400, f"{NOT_JSON}{message} {place(text, index)}")


def place(text: str, index: int) -> str:
    """Where the parser stands when it has consumed `index` characters; columns count bytes."""
    line_start = text.rfind("\n", 0, index) + 1
    line = text.count("\n", 0, index) + 1
    return f"at line {line} column {len(text[line_start:index].encode(errors='surrogatepass'))}"


class _NumberError(Exception):
    pass


def _finite(word: str) -> float:
    value = float(word)
    if not isfinite(value):
        raise _NumberError("number out of range", word)
    return value


def _integer(word: str) -> int:
    if len(word) > _MAX_DIGITS:
        raise _NumberError("number out of range", word)
    return int(word)


def _not_a_number(word: str) -> NoReturn:
    raise _NumberError("expected value", word)


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


_MESSAGES = {
    "Expecting value": "expected value",
    "Extra data": "trailing characters",
    "Expecting ':' delimiter": "expected `:`",
    "Expecting property name enclosed in double quotes": "key must be a string",
    "Illegal trailing comma before end of object": "trailing comma",
    "Illegal trailing comma before end of array": "trailing comma",
    "Unterminated string starting at": "EOF while parsing a string",
    "Invalid control character at": "control character (\\u0000-\\u001F) found while parsing a string",
    "Invalid \\escape": "invalid escape",
    "Invalid \\uXXXX escape": "invalid escape",
}
"""Python's messages, and the router's."""


def _as_the_router_says_it(error: json.JSONDecodeError, text: str) -> tuple[str, str, int]:
    message = _MESSAGES.get(error.msg.rstrip(":").strip(), error.msg)
    at_end = error.pos >= len(text.rstrip())
    if message == "EOF while parsing a string":
        return message, text, len(text)
    if error.msg == "Expecting ',' delimiter":
        kind = "object" if _innermost(text[: error.pos]) == "{" else "list"
        message = f"expected `,` or `{'}' if kind == 'object' else ']'}`"
        return (f"EOF while parsing a{'n' if kind == 'object' else ''} {kind}" if at_end else message), text, error.pos
    if at_end:
        inside = _innermost(text)
        name = {"{": "an object", "[": "a list"}.get(inside if message != "expected value" else "", "a value")
        return f"EOF while parsing {name}", text, len(text)
    return message, text, error.pos + (message != "trailing comma")


def _innermost(text: str) -> str:
    """The bracket that is open at the end of `text`."""
    open_: list[str] = []
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text):
        word = found[0]
        if word in "[{":
            open_.append(word)
        elif word in "]}" and open_:
            open_.pop()
    return open_[-1] if open_ else ""
