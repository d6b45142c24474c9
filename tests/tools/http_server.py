"""A server of a test's own on this machine, in a thread: what the fakes of other people's services answer from."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], **state: object) -> Iterator[str]:
    """Its URL; each handler has `state` as attributes."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Quiet, handler), state))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
