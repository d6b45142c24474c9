"""A hub of models that huggingface_hub talks to over HTTP (`HF_ENDPOINT`): repositories made, written, read.

What an upload and a download ask for and nothing else of it; large files go the way of LFS, for which the client must
be told to leave Xet out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote, urlsplit

from .http_server import serving

TOKEN = "hf_of_a_test"
REVISION = "0123" * 10
LARGE = ".safetensors"


class Hub:
    """Filled by requests; a test looks into it."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.messages: list[str] = []  # of commits
        self.large: dict[str, bytes] = {}  # by digest
        self.is_read_only = False

    @property
    def environ(self) -> dict[str, str]:
        """Of a process that is a client."""
        chosen = {"HF_ENDPOINT": self.endpoint, "HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
        return {**chosen, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}


@contextmanager
def served() -> Iterator[Hub]:
    hub = Hub()
    with serving(_Handler, hub=hub) as hub.endpoint:
        yield hub


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" or self.hub.is_read_only:
            return self._answer(403, {"error": "You don't have the rights to create a model here"})
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            return self._create(json.loads(content))
        if path.endswith("/preupload/main"):
            return self._answer(200, {"files": [_mode(file) for file in json.loads(content)["files"]]})
        if path.endswith(".git/info/lfs/objects/batch"):
            return self._answer(200, {"objects": [self._upload(each) for each in json.loads(content)["objects"]]})
        found = re.fullmatch("/api/models/(.+)/commit/main", path)
        assert found, path
        return self._commit(found[1], [json.loads(line) for line in content.splitlines()])

    def do_PUT(self) -> None:
        content = self.rfile.read(int(self.headers["Content-Length"]))
        assert hashlib.sha256(content).hexdigest() == self.path.removeprefix("/lfs/")
        self.hub.large[self.path.removeprefix("/lfs/")] = content
        self._answer(200, {})

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if asked := re.fullmatch("/api/models/(.+)/revision/(.+)", path):
            return self._describe(asked[1])
        if asked := re.fullmatch("/api/models/(.+)/tree/(.+)", path):
            files = self.hub.repositories.get(asked[1], {}).items()
            tree = [{"type": "file", "path": name, "size": len(data), "oid": _digest(data)} for name, data in files]
            return self._send(200, json.dumps(tree).encode())
        asked = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path)
        data = self.hub.repositories.get(asked[1], {}).get(asked[2]) if asked else None
        if data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound"})
        return self._send(200, data, {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": REVISION})

    def do_HEAD(self) -> None:
        self.do_GET()

    def _create(self, asked: dict[str, Any]) -> None:
        name = f"{asked['organization']}/{asked['name']}"
        self.hub.repositories.setdefault(name, {})
        if asked.get("private") or asked.get("visibility") == "private":
            self.hub.private.add(name)
        self._answer(200, {"url": f"{self.hub.endpoint}/{name}", "name": name})

    def _upload(self, asked: dict[str, Any]) -> dict[str, Any]:
        return {**asked, "actions": {"upload": {"href": f"{self.hub.endpoint}/lfs/{asked['oid']}"}}}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = self.hub.repositories[name]
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.hub.large[value["oid"]]
        url = f"{self.hub.endpoint}/{name}/commit/{REVISION}"
        self._answer(200, {"success": True, "commitUrl": url, "commitOid": REVISION})

    def _describe(self, name: str) -> None:
        if name not in self.hub.repositories:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
        files = [{"rfilename": path} for path in self.hub.repositories[name]]
        return self._answer(200, {"id": name, "sha": REVISION, "siblings": files})

    def _answer(self, status: int, value: dict[str, Any]) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if file["path"].endswith(LARGE) else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
