"""What a cache answers instead of an artifact. A damaged entry is `manifest.Damaged`, and never leaves this package."""

from __future__ import annotations


class CacheUnavailable(Exception):
    """A place that cannot be read or written: no network, no permission, no such bucket. A server starts without it."""

    def __init__(self, url: str, error: BaseException) -> None:
        why = " ".join(str(error).split()) or "no reason given"
        super().__init__(f"{url}: {type(error).__name__}: {why}")
