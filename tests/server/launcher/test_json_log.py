"""One JSON object per line, whoever writes it."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import sys

import pytest

from neuronserve.server.launcher import json_log


def test_a_record() -> None:
    record = logging.LogRecord("vllm.engine", logging.WARNING, "f.py", 1, "%d tokens\nleft", (3,), None)

    found = json.loads(json_log.JsonFormatter().format(record))

    assert (found["level"], found["target"]) == ("WARN", "vllm.engine")
    assert found["message"] == found["fields"]["message"] == "3 tokens\nleft"
    assert found["timestamp"].endswith("Z")


def test_a_record_of_an_exception_is_one_line() -> None:
    try:
        raise ValueError("no")
    except ValueError:
        record = logging.LogRecord("vllm", logging.ERROR, "f.py", 1, "failed", (), sys.exc_info())
    text = json_log.JsonFormatter().format(record)

    assert "\n" not in text
    assert "ValueError: no" in json.loads(text)["message"]


def test_the_launcher_s_own_lines_have_tgi_s_target() -> None:
    record = logging.LogRecord("neuronserve.server.launcher.moments", logging.INFO, "f.py", 1, "Connected", (), None)
    assert json.loads(json_log.JsonFormatter().format(record))["target"] == "text_generation_launcher"


def test_lines_of_others_become_messages() -> None:
    under = io.StringIO()
    stream = json_log.JsonLines(under, "stderr")

    print("28 graphs", file=stream)
    stream.write('{"message": "already"}\n\nhalf a ')
    stream.write("line\nand the rest")
    stream.write("\nerror: no such port\n")
    stream.close()

    found = [json.loads(line) for line in under.getvalue().splitlines()]
    assert [line["message"] for line in found] == [
        "28 graphs",
        "already",
        "half a line",
        "and the rest",
        "error: no such port",
    ]
    assert found[-1]["level"] == "ERROR"
    assert found[0]["target"] == "stderr"


def test_the_configuration_is_one(capsys: pytest.CaptureFixture[str]) -> None:
    loggers = [logging.getLogger(name) for name in ("vllm", "uvicorn", "")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    try:
        logging.config.dictConfig(json.loads(json.dumps(json_log.configuration("INFO"))))
        logging.getLogger("uvicorn.access").info("GET /health")
        logging.getLogger("vllm.x").debug("not this")
    finally:
        for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
            logger.handlers[:] = handlers
            logger.setLevel(level)
            logger.propagate = propagate
    assert [json.loads(line)["message"] for line in capsys.readouterr().out.splitlines()] == ["GET /health"]
