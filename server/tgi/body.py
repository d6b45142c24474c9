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


@dataclass(frozen=True)
class Body:
    """Made by `read`."""

    raw: bytes
    text: str  # for the positions that errors quote
    value: Any


async def read(request: Request, limit: int) -> Body:
    check_content_type(request.headers.get("content-type", ""))
    return parse(await read_bytes(request, limit))


def check_content_type(header: str) -> None:
    kind, _, subtype = header.split(";")[0].strip().lower().partition("/")
    if kind != "application" or not (subtype == "json" or subtype.endswith("+json")):
        raise TransportError(415, "Expected request with `Content-Type: application/json`")


async def read_bytes(request: Request, limit: int) -> bytes:
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
    return Body(raw, text, value)


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
    _finite(word)  # the router reads long ones so; and Python does not read integers of very many digits
    return int(word)


def _not_a_number(word: str) -> NoReturn:
    raise _NumberError("expected value", word)


def _has_lone_surrogate(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _as_the_router_says_it(error: json.JSONDecodeError, text: str) -> tuple[str, str, int]:
    """Message, text and place. Python's messages and places differ between its versions: where they do, the text
    decides."""
    said = error.msg
    if said.startswith("Unterminated string"):
        return "EOF while parsing a string", text, len(text)
    if said.startswith("Invalid control character"):
        return "control character (\\u0000-\\u001F) found while parsing a string", text, error.pos + 1
    if said.startswith("Invalid \\"):
        return "invalid escape", text, error.pos + 1
    index = _next_word(text, error.pos + said.startswith("Illegal trailing comma"))
    if index == len(text):
        return f"EOF while parsing {_unfinished(text, said)}", text, index
    return _syntax_error(said, text, index), text, index + 1


def _syntax_error(said: str, text: str, index: int) -> str:
    if said.startswith("Extra data"):
        return "trailing characters"
    if said.startswith("Expecting ':'"):
        return "expected `:`"
    if said.startswith("Expecting ','"):
        return f"expected `,` or `{'}' if _innermost(text[:index]) == '{' else ']'}`"
    if text[index] in "}]" and text[:index].rstrip().endswith(","):
        return "trailing comma"
    return "key must be a string" if said.startswith("Expecting property name") else "expected value"


def _unfinished(text: str, said: str) -> str:
    if said.startswith("Expecting value") and text.rstrip()[-1:] != "[":
        return "a value"
    return {"{": "an object", "[": "a list"}.get(_innermost(text), "a value")


def _next_word(text: str, index: int) -> int:
    return len(text) - len(text[index:].lstrip(" \t\r\n"))


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
