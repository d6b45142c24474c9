"""A bucket that s3fs talks to over HTTP: what the cache asks of S3, and nothing else of it.

Objects are in memory; signatures are not checked, only that there is one. `without_s3fs` is the other side: a process
in which the package is not installed.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

import fsspec  # type: ignore[import-untyped]
import pytest
from fsspec.registry import _registry  # type: ignore[import-untyped]

from .http_server import serving

WHEN = "2026-06-30T00:00:00.000Z"
NAMESPACE = "http://s3.amazonaws.com/doc/2006-03-01/"


class Bucket:
    """Filled by requests; a test looks into it, and spoils what is there."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []  # "GET key", in order
        self.is_read_only = False


@contextmanager
def served(monkeypatch: pytest.MonkeyPatch, name: str = "graphs") -> Iterator[Bucket]:
    """The bucket behind s3:// of this process and of those it starts."""
    bucket = Bucket(name)
    with serving(_Handler, bucket=bucket) as url:
        for key, value in {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": "a-key",
            "AWS_SECRET_ACCESS_KEY": "a-secret",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": "/nowhere",
            "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        }.items():
            monkeypatch.setenv(key, value)
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        try:
            yield bucket
        finally:
            fsspec.get_filesystem_class("s3").clear_instance_cache()


def without_s3fs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(_registry, "s3", raising=False)


class _Handler(BaseHTTPRequestHandler):
    bucket: Bucket

    def do_GET(self) -> None:
        if not self._key:
            return self._answer(200, self._listing())
        content = self.bucket.objects.get(self._key)
        if content is None:
            return self._refuse(404, "NoSuchKey")
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self._answer(200, content)
        first, last = int(asked[1]), min(int(asked[2] or len(content)), len(content) - 1)
        if first >= len(content):
            return self._refuse(416, "InvalidRange")
        return self._answer(206, content[first : last + 1], {"Content-Range": f"bytes {first}-{last}/{len(content)}"})

    def do_HEAD(self) -> None:
        content = self.bucket.objects.get(self._key)
        self._answer(200, content) if content is not None else self._refuse(404, "")

    def do_PUT(self) -> None:
        content = self._body()
        if self.bucket.is_read_only:
            return self._refuse(403, "AccessDenied")
        source = self.headers.get("x-amz-copy-source")
        if source is None:
            self.bucket.objects[self._key] = content
            return self._answer(200, b"", {"ETag": _tag(content)})
        key = unquote(source).lstrip("/").partition("/")[2]
        if key not in self.bucket.objects:
            return self._refuse(404, "NoSuchKey")
        self.bucket.objects[self._key] = content = self.bucket.objects[key]
        return self._answer(200, _xml("CopyObjectResult", f"<ETag>{_tag(content)}</ETag>"))

    def do_DELETE(self) -> None:
        self.bucket.objects.pop(self._key, None)
        self._answer(204, b"")

    def do_POST(self) -> None:
        """Many objects at once, which is all that is posted here."""
        for key in ElementTree.fromstring(self._body()).iter(f"{{{NAMESPACE}}}Key"):
            self.bucket.objects.pop(key.text or "", None)
        self._answer(200, _xml("DeleteResult", ""))

    def _listing(self) -> bytes:
        asked = {name: values[0] for name, values in parse_qs(urlsplit(self.path).query).items()}
        prefix, delimiter = asked.get("prefix", ""), asked.get("delimiter", "")
        keys, folders = [], set()
        for key in sorted(self.bucket.objects):
            if not key.startswith(prefix):
                continue
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.partition(delimiter)[0] + delimiter)
            else:
                keys.append(key)
        found = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{WHEN}</LastModified>"
            f"<ETag>{_tag(self.bucket.objects[key])}</ETag><Size>{len(self.bucket.objects[key])}</Size></Contents>"
            for key in keys
        )
        found += "".join(
            f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
        )
        return _xml("ListBucketResult", f"<IsTruncated>false</IsTruncated><KeyCount>{len(keys)}</KeyCount>{found}")

    @property
    def _key(self) -> str:
        bucket, _, key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")
        assert bucket == self.bucket.name, self.path
        assert "AWS4-HMAC-SHA256 Credential=a-key/" in self.headers["Authorization"]
        return key

    def _body(self) -> bytes:
        content = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return content
        found = b""
        while size := int(content.partition(b"\r\n")[0].partition(b";")[0], 16):
            start = content.index(b"\r\n") + 2
            found, content = found + content[start : start + size], content[start + size + 2 :]
        return found

    def _answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.bucket.requests.append(f"{self.command} {self._key}")
        self.send_response(status)
        facts = {"ETag": _tag(content), "Last-Modified": "Tue, 30 Jun 2026 00:00:00 GMT", **(headers or {})}
        for name, value in {**facts, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        self._answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())


def _tag(content: bytes) -> str:
    return f'"{hashlib.md5(content).hexdigest()}"'


def _xml(name: str, inside: str) -> bytes:
    return f'<?xml version="1.0" encoding="UTF-8"?><{name} xmlns="{NAMESPACE}">{inside}</{name}>'.encode()
