"""The images' health check against servers that answer, refuse, and are not there."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

import healthcheck  # isort: skip


@contextmanager
def server(status: int) -> Iterator[int]:
    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as serving:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        yield serving.server_address[1]
        serving.shutdown()


def test_a_server_that_answers_is_healthy() -> None:
    with server(200) as port:
        assert healthcheck.problem(port) is None


def test_a_server_whose_engine_is_gone_is_not() -> None:
    with server(503) as port:
        assert healthcheck.problem(port) == "/health answered 503"


def test_a_server_that_does_not_listen_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(healthcheck, "PORT_FILE", tmp_path / "port")

    assert healthcheck.main() == 1
    (tmp_path / "port").write_text(f"{port}\n")
    assert healthcheck.main() == 1
    assert f"port {port}" in capsys.readouterr().err
