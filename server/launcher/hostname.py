"""The address to listen on. Docker sets HOSTNAME to the container's id, which is none."""

from __future__ import annotations

import ipaddress

from .deduce import Chosen

ANY = "0.0.0.0"


def bind_address(hostname: Chosen) -> tuple[str, str | None]:
    """(address, what to say). A flag is taken at its word; a variable must be an address, or it means every one."""
    name = str(hostname.value)
    if hostname.origin.startswith("--") or name == "localhost" or _is_address(name):
        return name, None
    return ANY, f"Invalid hostname, defaulting to {ANY} ({hostname.origin}={name})"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
