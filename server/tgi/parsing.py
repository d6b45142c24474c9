"""JSON into a request, or the plain-text refusal that TGI's router gives: path, what stands there, what was expected.

pydantic decides what is wrong; here its first error, in the order of the document, gets the router's words.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Any, NoReturn, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .body import Body, place
from .errors import TransportError
from .schemas import RustType, VertexRequest

M = TypeVar("M", bound=BaseModel)

WRONG_SHAPE = "Failed to deserialize the JSON body into the target type: "

_EXPECTED = {
    "string_type": "a string",
    "bool_type": "a boolean",
    "list_type": "a sequence",
    "float_type": "f32",
}
_NUMBERS = ("int_type", "int_from_float", "greater_than_equal", "less_than_equal")
_OBJECTS = ("model_type", "model_attributes_type", "dict_type")

_SPACE = re.compile(r"[ \t\r\n]*")
_DECODER = json.JSONDecoder()


def to_request(body: Body, model: type[M]) -> M:
    try:
        return model.model_validate(body.value)
    except ValidationError as error:
        refuse(body, model, error)


def to_variant(body: Body, model: type[M], family: str) -> M:
    """For a body that may be of several shapes: the router does not say what was wrong with any of them."""
    try:
        return model.model_validate(body.value)
    except ValidationError:
        refuse_all(family)


def refuse_all(family: str) -> NoReturn:
    raise TransportError(422, f"{WRONG_SHAPE}data did not match any variant of untagged enum {family}")


def refuse(body: Body, model: type[BaseModel], error: ValidationError) -> NoReturn:
    details = error.errors(include_url=False)
    if model is VertexRequest and any(len(detail["loc"]) > 2 for detail in details):
        refuse_all("VertexInstance")
    found = [(_message(body, model, detail), *_where(body, detail)) for detail in details]
    message, _, index = min(found, key=lambda one: one[1:])
    raise TransportError(422, f"{WRONG_SHAPE}{message} {place(body.text, index)}")


def _where(body: Body, detail: ErrorDetails) -> tuple[bool, int]:
    """Whether something is missing, which comes out at the very end; and where the parser stands then."""
    missing = detail["type"] in ("missing", "union_tag_not_found")
    path = detail["loc"][:-1] if detail["type"] == "missing" else detail["loc"]
    start, end = locate(body.text, path)
    opens = body.text[start] in "[{"
    return missing, end if missing or not opens else start


def _message(body: Body, model: type[BaseModel], detail: ErrorDetails) -> str:
    kind, location = detail["type"], detail["loc"]
    if kind == "missing":
        return f"{_path(location[:-1])}missing field `{location[-1]}`"
    if kind == "union_tag_not_found":
        return f"{_path(location)}missing field `type`"
    if kind == "union_tag_invalid":
        known = "`json`, `json_object`, `json_schema`, `regex`"
        return f"{_path(location)}unknown variant `{detail['ctx']['tag']}`, expected one of {known}"
    value = detail["input"]
    out_of_range = kind in ("greater_than_equal", "less_than_equal") and abs(value) < 2**64
    what = "value" if out_of_range else "type"
    return f"{_path(location)}invalid {what}: {_unexpected(value)}, expected {_expected(model, detail)}"


def _expected(model: type[BaseModel], detail: ErrorDetails) -> str:
    kind = detail["type"]
    if kind in _NUMBERS:
        return _rust_type(model, detail["loc"])
    if kind in _OBJECTS:
        return f"struct {detail['ctx']['class_name'] if 'ctx' in detail else model.__name__}"
    return _EXPECTED.get(kind, detail["msg"])


def _rust_type(model: type[BaseModel], location: tuple[int | str, ...]) -> str:
    """The name of a number's type, by the annotation of its field."""
    annotation: Any = model
    for step in location:
        if isinstance(annotation, type) and issubclass(annotation, BaseModel) and step in annotation.model_fields:
            field = annotation.model_fields[str(step)]
            annotation, marks = field.annotation, list(field.metadata)
            for part in get_args(annotation):
                marks += getattr(part, "__metadata__", ())
    return next((mark.name for mark in marks if isinstance(mark, RustType)), "a number")


def _path(location: tuple[int | str, ...]) -> str:
    if not location:
        return ""
    words = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location if step not in _TAGS)
    return f"{words.removeprefix('.')}: "


_TAGS = ("regex", "json", "json_object", "json_schema")
"""pydantic names the variant of a grammar in the path; it is no field."""


def _unexpected(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return f"boolean `{str(value).lower()}`"
        case int() if -(2**63) <= value < 2**64:
            return f"integer `{value}`"
        case int() | float():
            return f"floating point `{_decimal(value)}`"
        case str():
            return f"string {json.dumps(value, ensure_ascii=False)}"
        case list():
            return "sequence"
    return "map"


def _decimal(value: float) -> str:
    """As Rust writes it: the shortest digits that are this number, and never an exponent."""
    digits = f"{Decimal(repr(float(value))):f}"
    return digits if "." in digits else f"{digits}.0"


def locate(text: str, path: tuple[int | str, ...]) -> tuple[int, int]:
    """Start and end of the value that `path` leads to; steps that are not in the document stay where they are."""
    start = _skip(text, 0)
    for step in path:
        found = _step(text, start, step)
        if found is None:
            continue
        start = found
    return start, _DECODER.raw_decode(text, start)[1]


def _step(text: str, start: int, step: int | str) -> int | None:
    """Where the member `step` of the container at `start` begins."""
    inside_object = text[start] == "{"
    if text[start] not in "[{" or inside_object == isinstance(step, int):
        return None
    found, index, count = None, _skip(text, start + 1), 0
    while text[index] not in "]}":
        key: int | str = count
        if inside_object:
            key, index = _DECODER.raw_decode(text, index)
            index = _skip(text, _skip(text, index) + 1)  # over the colon
        if key == step:
            found = index  # the last of equal keys is the one that counts
        index = _skip(text, _DECODER.raw_decode(text, index)[1])
        index = _skip(text, index + 1) if text[index] == "," else index
        count += 1
    return found


def _skip(text: str, index: int) -> int:
    found = _SPACE.match(text, index)
    return found.end() if found else index
