"""Requests made from our own OpenAPI document, right ones and wrong ones: no 5xx, and every answer as documented.

`--cases N` says how many (500 unless given, 2,000 with `--full`; `make fuzz`: 10,000). Answers are kept to a few
tokens: what is tested is how requests are read and answered. Bodies that are no JSON have tables of their own beside
the routes' other tests.
"""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from ..tools.server import PATIENCE, Server

PROMISES = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
TOKENS = 3


def shortened(body: Any) -> Any:
    """The same body, where it would be answered at length answered shortly; whatever is wrong with it stays wrong."""
    if isinstance(body, dict) and isinstance(body.get("instances"), list):
        return {**body, "instances": [shortened(instance) for instance in body["instances"][:2]]}
    if not isinstance(body, dict) or not ({"inputs", "prompt", "messages"} & body.keys()):
        return body
    body = dict(body)
    if "inputs" not in body:
        return {**body, "max_tokens": _few(body.get("max_tokens"))}
    parameters = body.get("parameters", {})
    if isinstance(parameters, dict):
        body["parameters"] = {**parameters, "max_new_tokens": _few(parameters.get("max_new_tokens"))}
    return body


def _few(asked: Any) -> Any:
    """None and large numbers are valid, and long."""
    is_long = asked is None or (isinstance(asked, int) and not isinstance(asked, bool) and asked > TOKENS)
    return TOKENS if is_long and (asked is None or asked < 2**31) else asked


@pytest.fixture(scope="module")
def operations(tgi_server: Server) -> list[Any]:
    schema = schemathesis.openapi.from_url(f"{tgi_server.url}/api-doc/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    assert {operation.path for operation in found} >= {"/", "/generate", "/generate_stream", "/info", "/tokenize"}
    return found


def test_every_answer_is_as_documented(tgi_server: Server, operations: list[Any], cases: int) -> None:
    """Of every operation its share, half of it in requests that its schema forbids."""
    with_body = [operation for operation in operations if operation.body]
    share = cases // (2 * len(with_body))
    sent = 0

    def send(case: Any) -> None:
        nonlocal sent
        sent += 1
        case.body = shortened(case.body)
        case.call_and_validate(base_url=tgi_server.url, checks=PROMISES, timeout=PATIENCE)

    for operation in with_body:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            settings = hypothesis.settings(
                max_examples=share,
                deadline=None,
                database=None,
                derandomize=True,
                suppress_health_check=list(hypothesis.HealthCheck),
            )
            settings(hypothesis.given(operation.as_strategy(generation_mode=mode))(send))()

    assert sent >= cases * 0.9


def test_routes_without_a_body_answer_as_documented(tgi_server: Server, operations: list[Any]) -> None:
    for operation in operations:
        if not operation.body:
            operation.Case().call_and_validate(base_url=tgi_server.url, checks=PROMISES, timeout=PATIENCE)
