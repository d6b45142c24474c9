"""What a person reads when a server does not start."""

from __future__ import annotations

import logging
import sys

import pydantic
import pytest

from neuronserve.neuron_worker import startup_errors
from neuronserve.neuron_worker.device.errors import LoadError
from neuronserve.neuron_worker.errors import ConfigError
from neuronserve.neuron_worker.startup_errors import engine_errors_in_one_line, one_line


class Limits(pydantic.BaseModel):
    size: int

    @pydantic.field_validator("size")
    @classmethod
    def check(cls, size: int) -> int:
        raise ValueError("sizes are\n  positive")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ConfigError("key=1: use 2"), "key=1: use 2"),
        (LoadError("no weights"), "no weights"),
        (ValueError("two\n   lines"), "two lines"),
        (KeyError("name"), "KeyError: 'name'"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_an_error_in_one_line(error: Exception, line: str) -> None:
    assert one_line(error) == line


def test_pydantics_page_becomes_what_was_wrong() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        Limits(size=1)

    assert one_line(caught.value) == "size: sizes are positive"


def test_pydantics_own_words_are_given_the_value() -> None:
    with pytest.raises(pydantic.ValidationError) as caught:
        pydantic.TypeAdapter(pydantic.PositiveInt).validate_python(0)

    assert one_line(caught.value) == "Input should be greater than 0, not 0"


@pytest.fixture
def records(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr(startup_errors, "debugging", lambda: False)
    return caplog


def fail_as_vllm_does(message: str) -> None:
    try:
        raise LoadError("no weights in\nthe directory")
    except LoadError as error:
        logging.getLogger("vllm.v1.engine.core").exception(message)
        raise error


def test_an_engine_that_does_not_start_says_one_line_and_exits(records: pytest.LogCaptureFixture) -> None:
    with pytest.raises(SystemExit) as exit_, engine_errors_in_one_line():
        fail_as_vllm_does("EngineCore failed to start.")

    assert exit_.value.code == 1
    assert "no weights in the directory (VLLM_LOGGING_LEVEL=DEBUG shows the traceback)" in records.text
    assert "Traceback" not in records.text


def test_an_engine_that_dies_later_keeps_its_traceback(records: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LoadError), engine_errors_in_one_line():
        fail_as_vllm_does("EngineCore encountered a fatal error.")

    assert "Traceback" in records.text


def test_debug_logging_keeps_the_traceback(records: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup_errors, "debugging", lambda: True)

    with pytest.raises(LoadError), engine_errors_in_one_line():
        fail_as_vllm_does("EngineCore failed to start.")

    assert "Traceback" in records.text


def test_the_filter_leaves_with_the_engine(records: pytest.LogCaptureFixture) -> None:
    with engine_errors_in_one_line():
        pass

    assert logging.getLogger("vllm.v1.engine.core").filters == []


@pytest.mark.parametrize(
    ("argv", "ours"), [(["/usr/bin/vllm", "serve"], True), (["script.py"], False), (["pytest"], False)]
)
def test_only_vllms_own_program_is_spoken_for(argv: list[str], ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", argv)

    assert startup_errors.is_vllm_command() is ours
